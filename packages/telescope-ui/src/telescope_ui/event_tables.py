"""The stages of attempts in `events/` of a run, as tables in SQL: one file for each step."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from telescope_ui.block_tables import Source
from telescope_ui.damage import MAX_LINE_BYTES, Damage
from telescope_ui.index.database import quoted
from telescope_ui.run_files import Listed, listed, literal_paths, step_of

_TYPES = {
    **{"time_s": "DOUBLE", "step": "INTEGER", "index": "INTEGER", "attempt": "INTEGER"},
    **{"call": "INTEGER", "version": "INTEGER"},
    **dict.fromkeys(("environment", "group_id", "stage", "server", "reason"), "VARCHAR"),
}


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
    found: dict[int, StepEvents] = {}
    for one in listed(run, "events", suffixes=(".parquet", ".jsonl")):
        step = step_of(one.name)
        if step is None:
            continue
        before = found.get(step, StepEvents(None, None))
        is_packed = one.name.endswith(".parquet")
        found[step] = before._replace(**{"packed" if is_packed else "lines": one})
    return dict(sorted(found.items()))


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


def all_files(steps: Iterable[StepEvents]) -> list[Listed]:
    """Return every file of `steps`."""
    return [file for step in steps for file in filter(None, step)]


def events_source(files: Sequence[Listed], columns: Sequence[str]) -> Source | None:
    """Return `columns` of files of events; None without any file."""
    chosen = ", ".join(quoted(name) for name in columns)
    parts: list[str] = []
    values: list[object] = []
    for suffix, reader in (
        (".parquet", "read_parquet(?, union_by_name = true, filename = true)"),
        (".jsonl", _lines()),
    ):
        paths = [one.path for one in files if one.name.endswith(suffix)]
        if paths:
            parts.append(f"SELECT {chosen} FROM {reader}")
            values.append(literal_paths(paths))
    if not parts:
        return None
    return Source(sql=f"({' UNION ALL '.join(parts)})", values=tuple(values))


def _lines() -> str:
    schema = ", ".join(f"\"{name}\": '{kind}'" for name, kind in _TYPES.items())
    return (
        f"read_json(?, format = 'newline_delimited', columns = {{{schema}}}, filename = true, "
        f"ignore_errors = true, maximum_object_size = {MAX_LINE_BYTES})"
    )
