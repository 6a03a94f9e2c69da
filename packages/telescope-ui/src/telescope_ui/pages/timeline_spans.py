"""All spans of a run, from all its records, as one table in SQL: `Spans`.

Model calls, spans of ranks and driver, and stages of attempts become rows of the same columns.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.base.lanes import Bar, seconds_by_name
from telescope_ui.base.parameters import WindowParameters
from telescope_ui.files.damage import answering
from telescope_ui.files.database import Database, quoted
from telescope_ui.files.run_files import Listed
from telescope_ui.index.block_tables import (
    Source,
    block_files,
    block_problems,
    block_source,
    source_of,
)
from telescope_ui.index.event_tables import (
    StepEvents,
    all_files,
    events_by_step,
    num_events,
    stages_of,
    usable,
)
from telescope_ui.index.one_run import OneRun, seconds_of
from telescope_ui.pages.happened import eval_points, server_events

COLUMNS = (
    *("source", "time_s", "duration_s", "name", "step", "version", "note"),
    *("environment", "group_id", "index", "attempt"),
)
MAX_STEP_FILES = 48
"""Most files of `events/` that are read for one answer."""
MAX_EVENTS = 64_000
"""Most events that are read for one answer."""
_STEPS_AHEAD = 16
"""Most steps by which rollouts are sampled ahead of their training."""
_KEYS = ("environment", "group_id", "index", "attempt")
_KEY = 'group_id, "index", attempt'
_NO_KEY = "'' AS environment, '' AS group_id, 0 AS \"index\", 0 AS attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """An interval of time."""

    first_s: float
    last_s: float

    @property
    def length_s(self) -> float:
        """Length of the window; never 0."""
        return max(1e-6, self.last_s - self.first_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The spans of a run in a window."""

    source: Source | None
    """Table with `COLUMNS` of each span; None if there are none."""
    kinds: tuple[str, ...]
    """The kinds of records: `timeline`, `calls`, `events`."""
    is_too_wide: bool
    """Whether stages of attempts are left out because there are too many."""
    problems: tuple[str, ...] = ()
    """Files that could not be read, with reasons."""


def spans_of(run: OneRun, database: Database, window: Window) -> Spans:
    """Return the spans in `window`."""
    parts: list[str] = []
    values: list[object] = []
    kinds: list[str] = []
    damage = database.damage
    spans = block_source(damage, run.path, "timeline", COLUMNS[:7])
    if spans is not None:
        kinds.append("timeline")
        parts.append(f"SELECT {', '.join(COLUMNS[:7])}, {_NO_KEY} FROM {spans.sql}")
        values += spans.values
    names = ("time_s", "duration_s", "server", "step", "version", "error")
    calls = block_source(damage, run.path, "calls", (*names, *_KEYS))
    if calls is not None:
        kinds.append("calls")
        parts.append(
            "SELECT server AS source, time_s, duration_s, 'call' AS name, step, version, "
            f"error AS note, environment, {_KEY} FROM {calls.sql}"
        )
        values += calls.values
    by_step = events_by_step(run.path)
    chosen = _in_window(run, by_step, window)
    problems = block_problems(damage, run.path, "timeline", "calls")
    found = usable(damage, chosen if len(chosen) <= MAX_STEP_FILES else ())
    is_too_wide = len(chosen) > MAX_STEP_FILES or num_events(found.files) > MAX_EVENTS
    if by_step:
        kinds.append("events")
    if not is_too_wide:
        problems += found.problems
        stages = stages_of(found.files, with_generating=calls is None)
        if stages is not None:
            parts.append(f"SELECT {', '.join(map(quoted, COLUMNS))} FROM {stages.sql}")
            values += stages.values
    joined = " UNION ALL ".join(parts)
    # A line that somebody else wrote may say of nobody.
    named = f"(SELECT * FROM ({joined}) WHERE source IS NOT NULL)"
    source = Source(sql=named, values=tuple(values)) if parts else None
    return Spans(
        source=source, kinds=tuple(kinds), is_too_wide=is_too_wide, problems=tuple(problems)
    )


def answering_in(
    run: OneRun, database: Database, asked: WindowParameters, answer: Callable[[], JsonObject]
) -> JsonObject:
    """Return `answer()`, which reads the spans of a window, without files that make it fail."""

    def blocks() -> list[Listed]:
        return [one for folder in ("timeline", "calls") for one in block_files(run.path, folder)]

    def events() -> list[Listed]:
        window = window_of(extent_of(run, database), asked.first_s, asked.last_s)
        chosen = _in_window(run, events_by_step(run.path), window)
        return all_files(chosen) if len(chosen) <= MAX_STEP_FILES else []

    damage = database.damage
    return answering(damage, blocks, lambda: answering(damage, events, answer))


def window_of(extent: Window | None, first_s: float | None, last_s: float | None) -> Window:
    """Return the requested window, by default all of `extent`."""
    base = extent or Window(first_s=0.0, last_s=1.0)
    found = Window(
        first_s=base.first_s if first_s is None else first_s,
        last_s=base.last_s if last_s is None else last_s,
    )
    if found.last_s < found.first_s:
        raise ParameterError(
            f"to: expected a time after from ({found.first_s:.3f}), got {found.last_s:.3f}"
        )
    return found


@lru_cache(maxsize=4096)
def _extent(database: Database, folder: str, file: Listed) -> tuple[float | None, float | None]:
    """Return the start of the first span in a file, and the end of the last one.

    The stamp in `file` makes another content another question.
    """
    source = source_of(database.damage, folder, [file], ("time_s", "duration_s"))
    if source is None:
        return None, None
    sql = f"SELECT min(time_s), max(time_s + duration_s) FROM {source.sql}"
    return database.rows(sql, source.values)[0]


def _in_window(run: OneRun, by_step: Mapping[int, StepEvents], window: Window) -> list[StepEvents]:
    """Return the files of the steps whose rollouts may have been played in `window`."""
    ends = step_ends(run)
    steps = [step for step, _ in ends]
    times = [time_s for _, time_s in ends]
    # A step ends after all of its rollouts, and those began not before some steps earlier.
    first = bisect.bisect_left(times, window.first_s)
    last = bisect.bisect_right(times, window.last_s)
    # Not the nearest ones: where a clock was set back, later steps end earlier.
    low = min(steps[first:], default=max(steps, default=-1) + 1)
    high = max(steps[: last + 1]) + _STEPS_AHEAD if last < len(steps) else 2**31
    return [one for step, one in by_step.items() if low <= step <= high]


def step_ends(run: OneRun) -> list[tuple[int, float]]:
    """Return (step, end in Unix seconds), in order of time."""
    if "time_s" not in run.metrics.names():
        return []
    columns = run.metrics.columns(["time_s"])
    pairs = zip(columns.steps, columns.values["time_s"], strict=True)
    return sorted(
        ((step, time_s) for step, time_s in pairs if time_s == time_s), key=lambda pair: pair[1]
    )


def extent_of(run: OneRun, database: Database) -> Window | None:
    """Return the times of the first and the last record; None if there are none."""
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
    known = _plausible(times)
    if not known:
        # Records say better when a run ended: their clock does not jump, and that of its end does
        # when somebody sets it or the machine sleeps.
        known = _plausible([seconds_of(info.ended_at)])
    known += _plausible([seconds_of(info.started_at)])
    return Window(first_s=min(known), last_s=max(known)) if known else None


def _plausible(times: Sequence[object]) -> list[float]:
    return [float(one) for one in times if isinstance(one, int | float) and 0 < one < 1e11]


def where_time_went(run: OneRun, database: Database, window: Window) -> list[JsonObject]:
    """Return the seconds of the window by activity of the driver, longest first.

    Evals count where the driver did nothing else. The rest has the name "", so that all rows add up
    to the window.
    """
    first_s, last_s = window.first_s, window.last_s
    columns = ("source", "name", "time_s", "duration_s")
    spans = block_source(database.damage, run.path, "timeline", columns)
    own: list[tuple[str, Bar]] = []
    if spans is not None:
        sql = (
            f"SELECT name, time_s, time_s + duration_s FROM {spans.sql} WHERE source = 'driver' "
            "AND duration_s > 0 AND time_s < ? AND time_s + duration_s > ?"
        )
        rows = database.rows(sql, (*spans.values, last_s, first_s))
        own = [(name, Bar(max(start, first_s), min(end, last_s))) for name, start, end in rows]
    evals = [
        ("evals", Bar(max(end_s - length_s, first_s), min(end_s, last_s)))
        for point in eval_points(run)
        for end_s, length_s in [(point.get("time_s"), point.get("duration_s"))]
        if end_s and length_s and end_s > first_s and end_s - length_s < last_s
    ]
    seconds = seconds_by_name(own)
    busy_s = sum(seconds.values())
    with_evals_s = sum(seconds_by_name([*own, *evals]).values())
    found = sorted(seconds.items(), key=lambda pair: -pair[1])
    found += [("evals", with_evals_s - busy_s), ("", max(0.0, window.length_s - with_evals_s))]
    return [{"name": name, "seconds": round(value, 6)} for name, value in found]
