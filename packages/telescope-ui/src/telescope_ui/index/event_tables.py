"""The stages of attempts in `events/` of a run, as tables in SQL: one file for each step."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from telescope_core.records.arrow import arrow_modules
from telescope_ui.files.damage import MAX_LINE_BYTES, Damage
from telescope_ui.files.database import quoted
from telescope_ui.files.run_files import Listed, listed, literal_paths, named, step_of
from telescope_ui.index.block_tables import Source

_TYPES = {
    **{"time_s": "DOUBLE", "step": "INTEGER", "index": "INTEGER", "attempt": "INTEGER"},
    **{"call": "INTEGER", "version": "INTEGER"},
    **dict.fromkeys(("environment", "group_id", "stage", "server", "reason"), "VARCHAR"),
}
_SUFFIXES = (".parquet", ".jsonl")
_LINE_BYTES = 150
"""Bytes of an event as a line, about."""
_KEYS = ("environment", "group_id", "index", "attempt")
_KEY = 'group_id, "index", attempt'
_SHOWN_STAGES = ("drawn", "waiting", "environment", "scoring")
"""Stages of attempts that are drawn; `generating` is too, where no calls of models are recorded."""
_STAGE_SOURCE = (
    "CASE WHEN stage = 'generating' THEN server WHEN stage IN ('drawn', 'waiting') "
    "THEN 'environment ' || environment || ': waiting' ELSE 'environment ' || environment END"
)
"""The row of a stage, in SQL: what waits is not among what is played."""


class StepEvents(NamedTuple):
    """The files of the rollouts that were drawn for a step."""

    packed: Listed | None
    """All of them, once nothing of the step is played any more."""
    lines: Listed | None


class Usable(NamedTuple):
    """Files that can be read, and what is against the others."""

    files: list[Listed]
    problems: list[str]


def events_by_step(run: Path) -> dict[int, StepEvents]:
    """Return the files of `events/` by the step that rollouts were drawn for, in its order."""
    return dict(sorted(_by_step(listed(run, "events", suffixes=_SUFFIXES)).items()))


def events_of_steps(run: Path, steps: Iterable[int]) -> dict[int, StepEvents]:
    """Return the files of those of `steps` that have some, in the order of `steps`."""
    names = [f"step-{step:06d}{suffix}" for step in steps for suffix in _SUFFIXES]
    return _by_step(named(run, "events", names=names))


def _by_step(files: Iterable[Listed]) -> dict[int, StepEvents]:
    found: dict[int, StepEvents] = {}
    for one in files:
        step = step_of(one.name)
        if step is None:
            continue
        before = found.get(step, StepEvents(None, None))
        is_packed = one.name.endswith(".parquet")
        found[step] = before._replace(**{"packed" if is_packed else "lines": one})
    return found


def usable(damage: Damage, steps: Iterable[StepEvents]) -> Usable:
    """Return one file for each of `steps`: the packed one if it can be read, else the lines."""
    found = Usable([], [])
    for step in steps:
        for file in filter(None, step):
            problem = damage.problem(file)
            if problem:
                found.problems.append(problem)
            else:
                if file.stamp.size:
                    found.files.append(file)
                break
    return found


def num_events(files: Iterable[Listed]) -> int:
    """Return about how many events are in files that can be read."""
    return sum(_num_rows(one) for one in files)


@lru_cache(maxsize=8192)
def _num_rows(file: Listed) -> int:
    """Count the rows of a file; its stamp makes another content another question."""
    if file.name.endswith(".jsonl"):
        return file.stamp.size // _LINE_BYTES
    arrow, parquet = arrow_modules()
    try:
        return parquet.read_metadata(file.path).num_rows
    except (arrow.ArrowException, OSError):
        return 0


def all_files(steps: Iterable[StepEvents]) -> list[Listed]:
    """Return every file of `steps`."""
    return [file for step in steps for file in filter(None, step)]


def events_source(files: Sequence[Listed], columns: Sequence[str]) -> Source | None:
    """Return `columns` of files of events; None without any file."""
    chosen = ", ".join(quoted(name) for name in columns)
    parts: list[str] = []
    values: list[object] = []
    for suffix, reader in (
        (".parquet", "read_parquet(?, union_by_name = true)"),
        (".jsonl", _lines()),
    ):
        paths = [one.path for one in files if one.name.endswith(suffix)]
        if paths:
            parts.append(f"SELECT {chosen} FROM {reader}")
            values.append(literal_paths(paths))
    if not parts:
        return None
    return Source(sql=f"({' UNION ALL '.join(parts)})", values=tuple(values))


def stages_of(files: Sequence[Listed], *, with_generating: bool) -> Source | None:
    """Return the stages of attempts as spans: each lasts until the next stage of its attempt."""
    names = ("time_s", "step", *_KEYS, "stage", "server", "version", "reason")
    events = events_source(files, names)
    if events is None:
        return None
    shown = [*_SHOWN_STAGES, *(("generating",) if with_generating else ())]
    ended = f"lead(time_s) OVER (PARTITION BY step, {_KEY} ORDER BY time_s)"
    sql = (
        f"SELECT {_STAGE_SOURCE} AS source, time_s, until_s - time_s AS duration_s, "
        "CASE WHEN stage = 'generating' THEN 'call' ELSE stage END AS name, step, version, "
        f"coalesce(reason, '') AS note, environment, {_KEY} "
        f"FROM (SELECT *, {ended} AS until_s FROM {events.sql}) "
        f"WHERE until_s IS NOT NULL AND stage IN ({', '.join(repr(one) for one in shown)})"
    )
    return Source(sql=f"({sql})", values=events.values)


def _lines() -> str:
    schema = ", ".join(f"\"{name}\": '{kind}'" for name, kind in _TYPES.items())
    return (
        f"read_json(?, format = 'newline_delimited', columns = {{{schema}}}, "
        f"ignore_errors = true, maximum_object_size = {MAX_LINE_BYTES})"
    )
