"""`/runs/{run}/timeline`: activities over time, as bars and densities in a window.

Below it, `trace.json` has them as trace events, which Perfetto and Chrome open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telescope_ui.base.answers import JsonObject
from telescope_ui.base.lanes import Bar, Change, depths_of, lanes_of, mean_numbers
from telescope_ui.base.parameters import TimelineParameters, WindowParameters
from telescope_ui.files.database import Database, quoted
from telescope_ui.index.block_tables import Source
from telescope_ui.index.one_run import OneRun, seconds_of
from telescope_ui.pages.happened import checkpoints, eval_points, server_events
from telescope_ui.pages.timeline_spans import (
    COLUMNS,
    MAX_EVENTS,
    MAX_STEP_FILES,
    Spans,
    Window,
    answering_in,
    extent_of,
    spans_of,
    step_ends,
    where_time_went,
    window_of,
)

_MAX_BARS = 2000
"""Most bars of one row; with more, all of them become a density."""
MAX_TRACE_SPANS = 200_000
"""Most spans of a trace for Perfetto; a longer trace is cut."""
_MAX_ALL_BARS = 10_000
_MAX_ROWS = 2000
_MAX_STEPS = 2000
_BUCKET_PIXELS = 4
_ORDER = ("driver", "rank", "server", "environment", "evals", "other")
_BARS = ("start_s", "duration_s", "lane", "name", "step", "version", "note", "address")
_STATES_LANE = -1
_COMPLETE: JsonObject = {"files_done": 0, "files_total": 0, "is_complete": True, "problems": []}
"""Text about windows that are read from the events themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The size of a pixel and of a bucket in a window."""

    window: Window
    width: int

    @property
    def pixel_s(self) -> float:
        return self.window.length_s / self.width

    @property
    def num_buckets(self) -> int:
        return self.width // _BUCKET_PIXELS

    @property
    def bucket_s(self) -> float:
        return self.window.length_s / self.num_buckets


def timeline_page(run: OneRun, database: Database, asked: TimelineParameters) -> JsonObject:
    """Return the rows of the timeline in a window."""
    return answering_in(run, database, asked, lambda: _page(run, database, asked))


def _page(run: OneRun, database: Database, asked: TimelineParameters) -> JsonObject:
    extent = extent_of(run, database)
    window = window_of(extent, asked.first_s, asked.last_s)
    scale = _Scale(window=window, width=asked.width)
    spans = spans_of(run, database, window)
    rows: dict[str, JsonObject] = {}
    num_spans = 0
    if spans.source is not None:
        rows, num_spans = _rows(run, database, spans.source, scale)
    states = server_events(run)
    for server, bars in _state_bars(states, scale).items():
        row = rows.setdefault(server, _empty_row(server, "server"))
        row["kind"] = "server"
        for name, values in bars.items():
            row["bars"]["columns"][name] += values
    index = _COMPLETE
    if spans.is_too_wide:
        index = run.stages.refresh()
        _add_stages(run, rows, scale, with_generating="calls" not in spans.kinds)
    _add_evals(run, rows, window)
    steps = [pair for pair in step_ends(run) if window.first_s <= pair[1] <= window.last_s + 1]
    steps = steps[:: max(1, -(-len(steps) // _MAX_STEPS))]
    return {
        "page": "timeline",
        "run": run.brief(),
        "extent": {
            "from": None if extent is None else extent.first_s,
            "to": None if extent is None else extent.last_s,
        },
        **{"from": window.first_s, "to": window.last_s, "bucket_s": scale.bucket_s},
        "rows": sorted(rows.values(), key=_row_order),
        "marks": _marks(run, states, window),
        "steps": {
            "columns": {"step": [one[0] for one in steps], "end_s": [one[1] for one in steps]}
        },
        "time": where_time_went(run, database, window),
        "index": index,
        **{"num_spans": num_spans, "max_trace_spans": MAX_TRACE_SPANS},
        "sources": [*spans.kinds, *(["servers"] if states else [])],
        "problems": [*spans.problems, *run.line_problems()],
    }


def _row_order(row: JsonObject) -> tuple[Any, ...]:
    label: str = row["label"]
    number = label.rpartition(" ")[2]
    return _ORDER.index(row["kind"]), int(number) if number.isdecimal() else 0, label


def _kind_of(source: str, *, is_called: bool = False) -> str:
    """Return the kind of a source of spans."""
    if source == "driver":
        return "driver"
    first = source.partition(" ")[0]
    if first in ("rank", "environment"):
        return first
    return "server" if is_called or "://" in source else "other"


def _empty_row(source: str, kind: str) -> JsonObject:
    return {
        **{"source": source, "kind": kind, "label": source, "num_lanes": 0},
        "bars": {"columns": {name: [] for name in _BARS}},
        **{"density": None, "is_too_wide": False},
    }


def _in_window(source: Source) -> str:
    return (
        f"(SELECT * FROM {source.sql} WHERE time_s < ? AND time_s + duration_s >= ? "
        "AND duration_s >= 0)"
    )


def _rows(
    run: OneRun, database: Database, source: Source, scale: _Scale
) -> tuple[dict[str, JsonObject], int]:
    """Return the rows of a window, and the number of their spans."""
    shown = _in_window(source)
    values = (*source.values, scale.window.last_s, scale.window.first_s)
    found = _narrow(database, Source(sql=shown, values=values), scale)
    most = min(_MAX_BARS, max(50, _MAX_ALL_BARS // max(1, len(found))))
    rows: dict[str, JsonObject] = {}
    for name, one in found.items():
        rows[name] = _empty_row(name, _kind_of(name, is_called=one.is_called))
        if one.density["bucket"]:
            rows[name]["density"] = one.density
    as_bars = [name for name, one in found.items() if 0 < one.num_wide <= most]
    if as_bars:
        sql = (
            f"SELECT {', '.join(map(quoted, COLUMNS))} FROM {shown} WHERE (duration_s >= ? "
            "OR duration_s = 0) AND source IN (SELECT unnest(?)) "
            "ORDER BY source, time_s, duration_s DESC"
        )
        _add_bars(run, rows, database.rows(sql, (*values, scale.pixel_s, as_bars)))
    crowded = [name for name, one in found.items() if one.num_wide > most]
    if crowded:
        chosen = f"(SELECT * FROM {shown} WHERE source IN (SELECT unnest(?)))"
        _add_density(database, rows, Source(sql=chosen, values=(*values, crowded)), scale)
    return rows, sum(one.num_all for one in found.values())


@dataclass(slots=True)
class _Narrow:
    """A source in a window: the number of wide bars, and the density of the others."""

    density: JsonObject
    num_wide: int = 0
    num_all: int = 0
    is_called: bool = False


def _narrow(database: Database, shown: Source, scale: _Scale) -> dict[str, _Narrow]:
    """Return the density of spans narrower than a pixel, counted where they began.

    One pass over all spans of the window, as there may be millions.
    """
    bucket = "CAST(floor(greatest(time_s - ?, 0) / ?) AS INTEGER)"
    sql = (
        f"SELECT source, CASE WHEN duration_s >= ? OR duration_s = 0 THEN -1 ELSE {bucket} END "
        "AS b, count(*), sum(duration_s), arg_max(name, duration_s), bool_or(name = 'call') "
        f"FROM {shown.sql} GROUP BY source, b ORDER BY source, b"
    )
    bound = (scale.pixel_s, scale.window.first_s, scale.bucket_s, *shown.values)
    found: dict[str, _Narrow] = {}
    for source, number, count, sum_s, name, is_called in database.rows(sql, bound):
        if source not in found and len(found) >= _MAX_ROWS:
            continue
        empty: JsonObject = {"bucket": [], "busy": [], "name": []}
        one = found.setdefault(source, _Narrow(empty))
        one.is_called |= is_called
        one.num_all += count
        if number < 0:
            one.num_wide = count
            continue
        one.density["bucket"].append(min(number, scale.num_buckets - 1))
        one.density["busy"].append(round(sum_s / scale.bucket_s, 4))
        one.density["name"].append(name)
    return found


def _add_bars(
    run: OneRun, rows: Mapping[str, JsonObject], found: Sequence[tuple[Any, ...]]
) -> None:
    by_source: dict[str, list[tuple[Any, ...]]] = {}
    for span in found:
        by_source.setdefault(span[0], []).append(span[1:])
    for source, spans in by_source.items():
        row = rows[source]
        bars = [Bar(span[0], span[0] + span[1]) for span in spans]
        is_nested = row["kind"] in ("driver", "rank")
        lanes = depths_of(bars) if is_nested else lanes_of(bars)
        row["num_lanes"] = 1 + max(lanes)
        addresses = [_rollout_address(run, span[3], span[6:]) for span in spans]
        columns = (
            *([span[at] for span in spans] for at in (0, 1)),
            lanes,
            *([span[at] for span in spans] for at in (2, 3, 4, 5)),
            addresses,
        )
        row["bars"] = {"columns": dict(zip(_BARS, columns, strict=True))}


def _rollout_address(run: OneRun, step: int | None, key: Sequence[Any]) -> str:
    """Return the address of a rollout, given (environment, group_id, index, attempt).

    Without a step it is a rollout of an eval, and the folder of the eval replaces the environment.
    Empty for work that is not done for a rollout.
    """
    environment, group_id, index, attempt = key
    if not group_id:
        return ""
    if step is None:
        return run.address("evals", environment, "rollouts", group_id, index)
    return run.address("rollouts", group_id, index, attempt)


def _add_density(
    database: Database, rows: Mapping[str, JsonObject], chosen: Source, scale: _Scale
) -> None:
    window = scale.window
    began = "greatest(time_s - ?, 0)"
    ended = "least(time_s + duration_s - ?, ?)"
    sql = (
        f"WITH clipped AS (SELECT source, name, {began} AS s, {ended} AS e FROM {chosen.sql}) "
        "SELECT source, CAST(floor(t / ?) AS INTEGER) AS b, sum(n), sum(n * t) FROM "
        "(SELECT source, s AS t, 1 AS n FROM clipped UNION ALL "
        "SELECT source, e AS t, -1 AS n FROM clipped) GROUP BY source, b"
    )
    bound = (window.first_s, window.first_s, window.length_s, *chosen.values, scale.bucket_s)
    changes: dict[str, list[Change]] = {}
    for source, bucket, count, sum_s in database.rows(sql, bound):
        changes.setdefault(source, []).append(Change(bucket, int(count), sum_s))
    names = _names(database, chosen, scale)
    for source, found in changes.items():
        busy = mean_numbers(found, num_buckets=scale.num_buckets, bucket_s=scale.bucket_s)
        shown: list[str] = []
        for bucket in busy:
            # Where nothing begins, what began before goes on.
            before = shown[-1] if shown else ""
            shown.append(names.get((source, bucket), before))
        rows[source]["density"] = {
            "bucket": list(busy),
            "busy": [round(value, 4) for value in busy.values()],
            "name": shown,
        }


def _names(database: Database, chosen: Source, scale: _Scale) -> dict[tuple[str, int], str]:
    """Return the name of the longest span that began in each bucket of each source."""
    window = scale.window
    sql = (
        "SELECT source, CAST(floor(greatest(time_s - ?, 0) / ?) AS INTEGER) AS b, "
        f"arg_max(name, duration_s) FROM {chosen.sql} GROUP BY source, b"
    )
    rows = database.rows(sql, (window.first_s, scale.bucket_s, *chosen.values))
    return {(source, bucket): name for source, bucket, name in rows}


def _add_stages(
    run: OneRun, rows: dict[str, JsonObject], scale: _Scale, *, with_generating: bool
) -> None:
    """Add the numbers of attempts in each stage, for a window with too many event files."""
    window = scale.window
    by_name: dict[tuple[str, str], list[Change]] = {}
    for one in run.stages.changes(window.first_s, window.last_s, scale.bucket_s):
        if with_generating or one.name != "call":
            change = Change(one.bucket, one.number, one.sum_s)
            by_name.setdefault((one.source, one.name), []).append(change)
    busy: dict[str, dict[int, JsonObject]] = {}
    for (source, name), changes in by_name.items():
        found = mean_numbers(changes, num_buckets=scale.num_buckets, bucket_s=scale.bucket_s)
        for bucket, value in found.items():
            cell = busy.setdefault(source, {}).setdefault(bucket, {"busy": 0.0, "most": 0.0})
            cell["busy"] += value
            if value > cell["most"]:
                cell |= {"most": value, "name": name}
    for source, cells in busy.items():
        row = rows.setdefault(source, _empty_row(source, _kind_of(source, is_called=True)))
        buckets = sorted(cells)
        row["is_too_wide"] = True
        row["density"] = {
            "bucket": buckets,
            "busy": [round(cells[bucket]["busy"], 4) for bucket in buckets],
            "name": [cells[bucket]["name"] for bucket in buckets],
        }


def _state_bars(events: Sequence[JsonObject], scale: _Scale) -> dict[str, JsonObject]:
    """Return the states of each server except `serving`, as bars; updates if wide enough."""
    window = scale.window
    by_server: dict[str, list[JsonObject]] = {}
    for event in sorted(events, key=lambda event: event["time_s"]):
        by_server.setdefault(str(event["server"]), []).append(event)
    found: dict[str, JsonObject] = {}
    for server, states in by_server.items():
        columns: JsonObject = {name: [] for name in _BARS}
        for at, state in enumerate(states):
            start_s = state["time_s"]
            end_s = states[at + 1]["time_s"] if at + 1 < len(states) else window.last_s
            is_shown = start_s < window.last_s and end_s >= window.first_s
            least_s = scale.pixel_s if state["state"] == "updating" else 0.0
            is_wide = end_s - start_s >= least_s and len(columns["name"]) < _MAX_BARS
            if state["state"] != "serving" and is_shown and is_wide:
                about = (state["state"], None, state["version"], state["reason"], "")
                values = (start_s, end_s - start_s, _STATES_LANE, *about)
                for name, value in zip(_BARS, values, strict=True):
                    columns[name].append(value)
        found[server] = columns
    return found


def _add_evals(run: OneRun, rows: dict[str, JsonObject], window: Window) -> None:
    """Add a row of the evals, unless spans include them."""
    points = [point for point in eval_points(run) if point.get("duration_s")]
    points = [
        point
        for point in points
        if point["time_s"] >= window.first_s
        and point["time_s"] - point["duration_s"] <= window.last_s
    ]
    if not points:
        return
    points.sort(key=lambda point: point["time_s"] - point["duration_s"])
    bars = [Bar(point["time_s"] - point["duration_s"], point["time_s"]) for point in points]
    row = rows["evals"] = _empty_row("evals", "evals")
    lanes = lanes_of(bars)
    row["num_lanes"] = 1 + max(lanes)
    for bar, lane, point in zip(bars, lanes, points, strict=True):
        folder = point["folder"]
        address = "" if folder is None else run.address("evals", folder)
        label = f"{point.get('name')} {point.get('tag')}"
        values = (
            *(bar.start_s, bar.end_s - bar.start_s, lane, label, None),
            *(point.get("version"), point.get("reason", ""), address),
        )
        for name, value in zip(_BARS, values, strict=True):
            row["bars"]["columns"][name].append(value)


def _marks(run: OneRun, states: Sequence[JsonObject], window: Window) -> list[JsonObject]:
    """Return the events in the window."""
    found: list[JsonObject] = []

    def add(time_s: float | None, kind: str, label: str, address: str = "") -> None:
        if time_s is not None and window.first_s <= time_s <= window.last_s:
            mark = {"time_s": time_s, "kind": kind, "label": label, "address": address}
            found.append(mark)

    for one in run.restarts.rows():
        add(one.get("time_s"), "restart", f"back to step {one.get('step')}: {one.get('reason')}")
    for one in checkpoints(run):
        add(seconds_of(one["created_at"]), "checkpoint", str(one["name"]))
    for one in eval_points(run):
        where = "" if one["folder"] is None else run.address("evals", one["folder"])
        add(one.get("time_s"), "eval", f"{one.get('name')} {one.get('tag')}", where)
    for one in states:
        if one["state"] in ("lost", "given up"):
            add(one["time_s"], "server", f"{one['server']} {one['state']}: {one['reason']}")
    return sorted(found, key=lambda mark: mark["time_s"])[:1000]


def trace_page(run: OneRun, database: Database, asked: WindowParameters) -> JsonObject:
    """Return the spans of a window as complete events, one process for each source.

    At most `MAX_TRACE_SPANS` are given, over all sources: those that began first. `otherData` says
    up to which time.
    """
    return answering_in(run, database, asked, lambda: _trace(run, database, asked))


def _trace(run: OneRun, database: Database, asked: WindowParameters) -> JsonObject:
    window = window_of(extent_of(run, database), asked.first_s, asked.last_s)
    spans = spans_of(run, database, window)
    rows = _trace_rows(database, spans, window)
    about = _trace_notes(spans, window, rows)
    rows = sorted(rows[:MAX_TRACE_SPANS], key=lambda row: (row[0], row[1], -row[2]))
    by_source: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_source.setdefault(row[0], []).append(row)
    events: list[JsonObject] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": source}}
        for pid, source in enumerate(by_source, 1)
    ]
    for pid, (source, own) in enumerate(by_source.items(), 1):
        events += _trace_events(run, pid, source, own)
    return {"traceEvents": events, "otherData": about}


def _trace_rows(database: Database, spans: Spans, window: Window) -> list[tuple[Any, ...]]:
    """Return the first spans of a window in order of time, and one more if there are more."""
    if spans.source is None:
        return []
    sql = (
        "SELECT source, time_s, duration_s, name, step, version, note, environment, group_id, "
        f'"index", attempt FROM {spans.source.sql} WHERE time_s < ? AND time_s + duration_s >= ? '
        f"AND duration_s >= 0 ORDER BY time_s, source, duration_s DESC LIMIT {MAX_TRACE_SPANS + 1}"
    )
    return database.rows(sql, (*spans.source.values, window.last_s, window.first_s))


def _trace_notes(spans: Spans, window: Window, rows: list[tuple[Any, ...]]) -> JsonObject:
    is_cut = len(rows) > MAX_TRACE_SPANS
    last_s = rows[MAX_TRACE_SPANS][1] if is_cut else window.last_s
    notes: list[str] = []
    if is_cut:
        notes.append(
            f"a trace holds {MAX_TRACE_SPANS:,} spans: this one ends at {last_s:.3f}; ask for the "
            f"rest with from={last_s:.3f}&to={window.last_s:.3f}"
        )
    if spans.is_too_wide:
        notes.append(
            f"stages of environments are left out, as they are more than {MAX_EVENTS:,} or in "
            f"more than {MAX_STEP_FILES} files; choose a smaller window"
        )
    return {
        **{"from": window.first_s, "to": last_s, "is_cut": is_cut},
        "has_stages": not spans.is_too_wide,
        "notes": notes,
        "problems": list(spans.problems),
    }


def _trace_events(
    run: OneRun, pid: int, source: str, own: list[tuple[Any, ...]]
) -> list[JsonObject]:
    is_nested = _kind_of(source) in ("driver", "rank")
    # Events of one thread must lie in each other, so what overlaps gets threads of its own.
    bars = [Bar(row[1], row[1] + row[2]) for row in own]
    threads = [0] * len(own) if is_nested else lanes_of(bars)
    found: list[JsonObject] = []
    for row, thread in zip(own, threads, strict=True):
        arguments: JsonObject = dict(zip(("step", "version", "note"), row[4:7], strict=True))
        address = _rollout_address(run, row[4], row[7:])
        if address:
            arguments["rollout"] = address
        found.append(
            {
                **{"ph": "X", "pid": pid, "tid": thread, "name": row[3], "args": arguments},
                **{"ts": row[1] * 1e6, "dur": row[2] * 1e6},
            }
        )
    return found
