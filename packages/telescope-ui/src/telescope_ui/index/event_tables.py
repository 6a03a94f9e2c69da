"""The stages of attempts in `events/` of a run, as tables in SQL; `step_files` says which files."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from telescope_core.base.errors import ConfigError
from telescope_core.records.arrow import arrow_modules
from telescope_core.records.events import AttemptEvent
from telescope_core.records.step_files import STEPS_PER_FILE, groups_in, merged_path
from telescope_ui.files.damage import Damage
from telescope_ui.files.database import quoted
from telescope_ui.files.run_files import Listed, listed, literal_paths, named, step_of
from telescope_ui.index.block_tables import Source, rows_of_lines

_SUFFIXES = (".parquet", ".jsonl")
_MANY = re.compile(r"steps-(\d+)-\d+\.parquet")
_LINE_BYTES = 150
"""Approximate bytes of an event as a line."""
_KEYS = ("environment", "group_id", "index", "attempt")
_KEY = 'group_id, "index", attempt'
_SHOWN_STAGES = ("drawn", "waiting", "environment", "scoring")
"""Stages that are drawn; `generating` as well, if no model calls are recorded."""
_STAGE_SOURCE = (
    "CASE WHEN stage = 'generating' THEN server WHEN stage IN ('drawn', 'waiting') "
    "THEN 'environment ' || environment || ': waiting' ELSE 'environment ' || environment END"
)
"""The row of a stage, in SQL; stages of waiting and of playing are in different rows."""


class StepEvents(NamedTuple):
    """The event files of the rollouts that were drawn for a step."""

    step: int
    packed: Listed | None
    """File with all events, once the step is complete; it may hold other steps too."""
    lines: Listed | None

    @property
    def files(self) -> list[Listed]:
        """The existing files, best first."""
        return [one for one in (self.packed, self.lines) if one is not None]


class EventStepFile(NamedTuple):
    """The file from which the events of a step are read."""

    step: int
    file: Listed


class Usable(NamedTuple):
    """Readable files, and problems of the others."""

    files: list[EventStepFile]
    problems: list[str]


def events_by_step(run: Path) -> dict[int, StepEvents]:
    """Return the files of `events/` by the step for which rollouts were drawn, in order."""
    return dict(sorted(_by_step(listed(run, "events", suffixes=_SUFFIXES)).items()))


def events_of_steps(run: Path, steps: Iterable[int]) -> dict[int, StepEvents]:
    """Return the files of those of `steps` that have some, in the order of `steps`."""
    wanted = list(steps)
    names = [f"step-{step:06d}{suffix}" for step in wanted for suffix in _SUFFIXES]
    names += dict.fromkeys(merged_path(run, step).name for step in wanted if step > 0)
    found = _by_step(named(run, "events", names=names))
    return {step: found[step] for step in wanted if step in found}


def _by_step(files: Iterable[Listed]) -> dict[int, StepEvents]:
    found: dict[int, StepEvents] = {}
    # Those of many steps first: where a step has a file of its own, that one counts.
    for one in sorted(files, key=lambda one: step_of(one.name) is not None):
        step = step_of(one.name)
        kind = "packed" if one.name.endswith(".parquet") else "lines"
        for each in _steps_together(one) if step is None else (step,):
            before = found.get(each, StepEvents(each, None, None))
            found[each] = before._replace(**{kind: one})
    return found


@lru_cache(maxsize=1024)
def _steps_together(file: Listed) -> Sequence[int]:
    """Return the other steps in a file of many; `stamp` identifies its content."""
    match = _MANY.fullmatch(file.name)
    if match is None:
        return ()
    try:
        return list(groups_in(file.path))
    except ConfigError:
        # Damage is told by who reads the file.
        return range(int(match[1]), int(match[1]) + STEPS_PER_FILE)


def usable(damage: Damage, steps: Iterable[StepEvents]) -> Usable:
    """Return one file for each of `steps`: the packed one if readable, else the lines."""
    found = Usable([], [])
    for step in steps:
        for file in step.files:
            problem = damage.problem(file)
            if not problem:
                if file.stamp.size:
                    found.files.append(EventStepFile(step.step, file))
                break
            if problem not in found.problems:
                found.problems.append(problem)
    return found


def num_events(files: Iterable[EventStepFile]) -> int:
    """Return the approximate number of events in readable files."""
    return sum(_num_rows(file) // max(1, len(_steps_together(file))) for _, file in files)


@lru_cache(maxsize=8192)
def _num_rows(file: Listed) -> int:
    """Count the rows of a file; `stamp` identifies its content."""
    if file.name.endswith(".jsonl"):
        return file.stamp.size // _LINE_BYTES
    arrow, parquet = arrow_modules()
    try:
        return parquet.read_metadata(file.path).num_rows
    except (arrow.ArrowException, OSError):
        return 0


def all_files(steps: Iterable[StepEvents]) -> list[Listed]:
    """Return every file of `steps`."""
    return list(dict.fromkeys(file for step in steps for file in step.files))


def events_source(files: Sequence[EventStepFile], columns: Sequence[str]) -> Source | None:
    """Return `columns` of the events of steps in files; None if there is no file."""
    chosen = f"SELECT {', '.join(quoted(name) for name in columns)} FROM"
    lines = [one for one in files if one.file.name.endswith(".jsonl")]
    together = [one for one in files if _steps_together(one.file)]
    apart = [one for one in files if one not in lines and one not in together]
    parquet = f"{chosen} read_parquet(?, union_by_name = true)"
    parts: list[str] = []
    values: list[object] = []
    for some, query in (
        (apart, parquet),
        (together, f"{parquet} WHERE step IN (SELECT unnest(?))"),
        (lines, rows_of_lines(AttemptEvent, columns)),
    ):
        if some:
            parts.append(query)
            values.append(literal_paths(list(dict.fromkeys(file.path for _, file in some))))
        if some is together and some:
            values.append([step for step, _ in some])
    if not parts:
        return None
    return Source(sql=f"({' UNION ALL '.join(parts)})", values=tuple(values))


def stages_of(files: Sequence[EventStepFile], *, with_generating: bool) -> Source | None:
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
