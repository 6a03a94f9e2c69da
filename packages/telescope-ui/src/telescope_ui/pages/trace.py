"""`/runs/{run}/timeline/trace.json`: spans as trace events, which Perfetto and Chrome open."""

from typing import Any

from telescope_ui.base.answers import JsonObject
from telescope_ui.base.lanes import Bar, lanes_of
from telescope_ui.base.parameters import WindowParameters
from telescope_ui.files.database import Database
from telescope_ui.index.one_run import OneRun
from telescope_ui.pages.timeline import MAX_TRACE_SPANS, kind_of, rollout_address
from telescope_ui.pages.timeline_spans import (
    MAX_EVENTS,
    MAX_STEP_FILES,
    Spans,
    Window,
    answering_in,
    extent_of,
    spans_of,
    window_of,
)


def trace_page(run: OneRun, database: Database, asked: WindowParameters) -> JsonObject:
    """Return the spans of a window as complete events, one process for each source.

    At most `MAX_TRACE_SPANS` are given, over all sources: those that began first. `otherData` says
    up to which time.
    """
    return answering_in(run, database, asked, lambda: _page(run, database, asked))


def _page(run: OneRun, database: Database, asked: WindowParameters) -> JsonObject:
    window = window_of(extent_of(run, database), asked.first_s, asked.last_s)
    spans = spans_of(run, database, window)
    rows = _rows(database, spans, window)
    about = _about(spans, window, rows)
    rows = sorted(rows[:MAX_TRACE_SPANS], key=lambda row: (row[0], row[1], -row[2]))
    by_source: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_source.setdefault(row[0], []).append(row)
    events: list[JsonObject] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": source}}
        for pid, source in enumerate(by_source, 1)
    ]
    for pid, (source, own) in enumerate(by_source.items(), 1):
        events += _events(run, pid, source, own)
    return {"traceEvents": events, "otherData": about}


def _rows(database: Database, spans: Spans, window: Window) -> list[tuple[Any, ...]]:
    """Return the first spans of a window in order of time, and one more if there are more."""
    if spans.source is None:
        return []
    sql = (
        "SELECT source, time_s, duration_s, name, step, version, note, environment, group_id, "
        f'"index", attempt FROM {spans.source.sql} WHERE time_s < ? AND time_s + duration_s >= ? '
        f"AND duration_s >= 0 ORDER BY time_s, source, duration_s DESC LIMIT {MAX_TRACE_SPANS + 1}"
    )
    return database.rows(sql, (*spans.source.values, window.last_s, window.first_s))


def _about(spans: Spans, window: Window, rows: list[tuple[Any, ...]]) -> JsonObject:
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


def _events(run: OneRun, pid: int, source: str, own: list[tuple[Any, ...]]) -> list[JsonObject]:
    is_nested = kind_of(source) in ("driver", "rank")
    # Events of one thread must lie in each other, so what overlaps gets threads of its own.
    bars = [Bar(row[1], row[1] + row[2]) for row in own]
    threads = [0] * len(own) if is_nested else lanes_of(bars)
    found: list[JsonObject] = []
    for row, thread in zip(own, threads, strict=True):
        arguments: JsonObject = dict(zip(("step", "version", "note"), row[4:7], strict=True))
        address = rollout_address(run, row[4], row[7:])
        if address:
            arguments["rollout"] = address
        found.append(
            {
                **{"ph": "X", "pid": pid, "tid": thread, "name": row[3], "args": arguments},
                **{"ts": row[1] * 1e6, "dur": row[2] * 1e6},
            }
        )
    return found
