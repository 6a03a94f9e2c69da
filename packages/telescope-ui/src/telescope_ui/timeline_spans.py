"""What lasted in a run, from all its records, as one table in SQL: `Spans`.

Model calls, spans of ranks and driver, and stages of attempts become rows of the same columns.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from telescope_ui.block_tables import Source, block_files, block_source, source_of
from telescope_ui.index.database import Database, literal_paths
from telescope_ui.one_run import OneRun, seconds_of
from telescope_ui.pages.overview import eval_points, server_events
from telescope_ui.pages.rollout import event_lines
from telescope_ui.run_files import Listed, listed, step_of

COLUMNS = (
    *("source", "time_s", "duration_s", "name", "step", "version", "note"),
    *("environment", "group_id", "index", "attempt"),
)
MAX_STEP_FILES = 48
"""Files of `events/` that are read for one answer."""
_STEPS_AHEAD = 16
"""Steps that rollouts are sampled ahead of their training, at most."""
_KEY = 'group_id, "index", attempt'
_NO_KEY = "'' AS environment, '' AS group_id, 0 AS \"index\", 0 AS attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of time."""

    first_s: float
    last_s: float

    @property
    def length_s(self) -> float:
        """How long it is; never 0."""
        return max(1e-6, self.last_s - self.first_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The spans of a run in a window."""

    source: Source | None
    """`COLUMNS` of each span; None without any."""
    kinds: tuple[str, ...]
    """Which records there are: `timeline`, `calls`, `events`."""
    is_too_wide: bool
    """Whether stages of attempts are left out, because they are in too many files."""


def spans_of(run: OneRun, database: Database, window: Window) -> Spans:
    """Return what lasted in `window`."""
    parts: list[str] = []
    values: list[object] = []
    kinds: list[str] = []
    spans = block_source(run.path, "timeline", COLUMNS[:7])
    if spans is not None:
        kinds.append("timeline")
        parts.append(f"SELECT {', '.join(COLUMNS[:7])}, {_NO_KEY} FROM {spans.sql}")
        values += spans.values
    names = ("time_s", "duration_s", "server", "step", "version", "error")
    calls = block_source(run.path, "calls", (*names, "environment", "group_id", "index", "attempt"))
    if calls is not None:
        kinds.append("calls")
        parts.append(
            "SELECT server AS source, time_s, duration_s, 'call' AS name, step, version, "
            f"error AS note, environment, {_KEY} FROM {calls.sql}"
        )
        values += calls.values
    files = listed(run.path, "events", suffixes=(".parquet", ".jsonl"))
    chosen = _event_files(run, files, window)
    is_too_wide = len(chosen) > MAX_STEP_FILES
    if files:
        kinds.append("events")
    if chosen and not is_too_wide:
        stages = _stages(chosen, with_generating=calls is None)
        parts.append(stages.sql)
        values += stages.values
    joined = " UNION ALL ".join(parts)
    source = Source(sql=f"({joined})", values=tuple(values)) if parts else None
    return Spans(source=source, kinds=tuple(kinds), is_too_wide=is_too_wide)


@lru_cache(maxsize=4096)
def _extent(database: Database, folder: str, file: Listed) -> tuple[float | None, float | None]:
    """Return when the first span of a file begins and the last one ends.

    The stamp in `file` makes another content another question.
    """
    source = source_of(folder, [file], ("time_s", "duration_s"))
    if source is None:
        return None, None
    sql = f"SELECT min(time_s), max(time_s + duration_s) FROM {source.sql}"
    return database.rows(sql, source.values)[0]


def _event_files(run: OneRun, files: Sequence[Listed], window: Window) -> list[Listed]:
    """Return the files of the steps whose rollouts may have been played in `window`."""
    by_step: dict[int, Listed] = {}
    for one in files:
        step = step_of(one.name)
        # Of a step in two forms, the packed one, which sorts last, is complete.
        if step is not None and one.stamp.size:
            by_step[step] = one
    ends = step_ends(run)
    steps = [step for step, _ in ends]
    times = [time_s for _, time_s in ends]
    # A step ends after all of its rollouts, and those began not before some steps earlier.
    first = bisect.bisect_left(times, window.first_s)
    last = bisect.bisect_right(times, window.last_s)
    low = steps[first] if first < len(steps) else (steps[-1] + 1 if steps else 0)
    high = steps[last] + _STEPS_AHEAD if last < len(steps) else 2**31
    return [one for step, one in sorted(by_step.items()) if low <= step <= high]


def step_ends(run: OneRun) -> list[tuple[int, float]]:
    """Return (step, when it ended in Unix seconds), in order of time."""
    if "time_s" not in run.metrics.names():
        return []
    columns = run.metrics.columns(["time_s"])
    pairs = zip(columns.steps, columns.values["time_s"], strict=True)
    return sorted(
        ((step, time_s) for step, time_s in pairs if time_s == time_s), key=lambda pair: pair[1]
    )


def _stages(files: Sequence[Listed], *, with_generating: bool) -> Source:
    """Return the stages of attempts: each lasts until the next stage of its attempt."""
    names = f"time_s, step, environment, {_KEY}, stage, server, version, reason"
    parts: list[str] = []
    values: list[object] = []
    for suffix, reader in (
        (".parquet", "read_parquet(?, union_by_name = true)"),
        (".jsonl", event_lines()),
    ):
        paths = [one.path for one in files if one.name.endswith(suffix)]
        if paths:
            parts.append(f"SELECT {names} FROM {reader}")
            values.append(literal_paths(paths))
    shown = "('environment', 'scoring'" + (", 'generating')" if with_generating else ")")
    ended = f"lead(time_s) OVER (PARTITION BY {_KEY} ORDER BY time_s)"
    sql = (
        "SELECT CASE WHEN stage = 'generating' THEN server ELSE 'environment ' || environment END "
        "AS source, time_s, until_s - time_s AS duration_s, "
        "CASE WHEN stage = 'generating' THEN 'call' ELSE stage END AS name, step, version, "
        f"coalesce(reason, '') AS note, environment, {_KEY} FROM (SELECT *, {ended} AS until_s "
        f"FROM ({' UNION ALL '.join(parts)})) WHERE until_s IS NOT NULL AND stage IN {shown}"
    )
    return Source(sql=sql, values=tuple(values))


def extent_of(run: OneRun, database: Database) -> Window | None:
    """Return when the first and the last of what is recorded happened; None without any."""
    times: list[float | None] = []
    ends = step_ends(run)
    if ends:
        times += [ends[0][1], ends[-1][1]]
    for folder in ("timeline", "calls"):
        for file in block_files(run.path, folder):
            times += _extent(database, folder, file)
    times += [event["time_s"] for event in server_events(run)]
    times += [point.get("time_s") for point in eval_points(run)]
    info = run.info()
    times += [seconds_of(info.started_at), seconds_of(info.ended_at)]
    known: list[Any] = [time_s for time_s in times if isinstance(time_s, int | float)]
    known = [time_s for time_s in known if 0 < time_s < 1e11]
    return Window(first_s=min(known), last_s=max(known)) if known else None
