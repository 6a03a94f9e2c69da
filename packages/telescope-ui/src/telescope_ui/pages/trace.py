"""`/runs/{run}/timeline/trace.json`: spans as trace events, which Perfetto and Chrome open."""

from telescope_ui.answers import JsonObject
from telescope_ui.index.database import Database
from telescope_ui.lanes import Bar, lanes_of
from telescope_ui.one_run import OneRun
from telescope_ui.pages.timeline import kind_of, rollout_address, window_of
from telescope_ui.parameters import WindowParameters
from telescope_ui.timeline_spans import extent_of, spans_of

MAX_EVENTS = 200_000


def trace_page(run: OneRun, database: Database, asked: WindowParameters) -> JsonObject:
    """Return the spans of a window as complete events, one process for each source."""
    window = window_of(extent_of(run, database), asked.first_s, asked.last_s)
    spans = spans_of(run, database, window)
    if spans.source is None:
        return {"traceEvents": []}
    sql = (
        "SELECT source, time_s, duration_s, name, step, version, note, environment, group_id, "
        f'"index", attempt FROM {spans.source.sql} WHERE time_s < ? AND time_s + duration_s >= ? '
        f"AND duration_s >= 0 ORDER BY source, time_s, duration_s DESC LIMIT {MAX_EVENTS}"
    )
    bound = (*spans.source.values, window.last_s, window.first_s)
    rows = database.rows(sql, bound)
    processes = {name: at for at, name in enumerate(dict.fromkeys(row[0] for row in rows), 1)}
    events: list[JsonObject] = [
        {"ph": "M", "name": "process_name", "pid": at, "tid": 0, "args": {"name": name}}
        for name, at in processes.items()
    ]
    for source, pid in processes.items():
        own = [row for row in rows if row[0] == source]
        bars = [Bar(row[1], row[1] + row[2]) for row in own]
        is_nested = kind_of(source) in ("driver", "rank")
        # Events of one thread must lie in each other, so what overlaps gets threads of its own.
        threads = [0] * len(own) if is_nested else lanes_of(bars)
        for row, thread in zip(own, threads, strict=True):
            arguments: JsonObject = dict(zip(("step", "version", "note"), row[4:7], strict=True))
            address = rollout_address(run, row[4], row[7:])
            if address:
                arguments["rollout"] = address
            events.append(
                {
                    **{"ph": "X", "pid": pid, "tid": thread, "name": row[3], "args": arguments},
                    **{"ts": row[1] * 1e6, "dur": row[2] * 1e6},
                }
            )
    return {"traceEvents": events}
