"""`/runs/{run}/infra`: readings of meters, thinned; with many GPUs, quantiles and outliers.

Queues of the sampler and the processes of environments are in the metrics of steps.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from telescope_core.records.identity import RunState
from telescope_core.records.servers import ServerState
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import Drawn, shared_curves
from telescope_ui.base.parameters import InfraParameters
from telescope_ui.base.wrong_addresses import unfit
from telescope_ui.files.damage import answering
from telescope_ui.files.database import Database
from telescope_ui.index import queries
from telescope_ui.index.block_tables import (
    Source,
    block_files,
    block_problems,
    block_source,
    incomplete_lines,
)
from telescope_ui.index.one_run import OneRun, seconds_of
from telescope_ui.pages.happened import server_events
from telescope_ui.pages.timeline_spans import Window, window_of

FLEET = 64
"""Number of GPUs above which not all of them are drawn."""
_MAX_SERIES = 2000
_MAX_OUTLIERS = 24
_LEAST_DEVIATIONS = 3.5
_LEAST_OF_MEAN = 3.0
"""Least deviation from the mean that is reported for four or fewer sources."""
_LEAST_SHARE = 0.02
_WORKERS = "workers/"
_LOST = (ServerState.LOST, ServerState.GIVEN_UP)
_STATES = ("time_s", "state", "life", "version", "reason")


def infra_page(run: OneRun, database: Database, asked: InfraParameters) -> JsonObject:
    """Return the meters of a run in a window, and the states of its servers."""
    return answering(
        database.damage,
        lambda: block_files(run.path, "gauges"),
        lambda: _page(run, database, asked),
    )


def _page(run: OneRun, database: Database, asked: InfraParameters) -> JsonObject:
    gauges = block_source(
        database.damage, run.path, "gauges", ("time_s", "source", "name", "value")
    )
    empty: JsonObject = {
        **{"sources": [], "names": [], "is_fleet": False, "series": [], "fleet": []},
        "outliers": [],
    }
    extent = None if gauges is None else _extent(database, gauges)
    window = window_of(extent, asked.first_s, asked.last_s)
    found = empty if gauges is None else _gauges(database, gauges, window, asked)
    queues = [name for name in run.metrics.names() if name.startswith("queue/")]
    return {
        "page": "infra",
        "run": run.brief(),
        "extent": None if extent is None else {"from": extent.first_s, "to": extent.last_s},
        **{"from": window.first_s, "to": window.last_s},
        **found,
        "servers": _servers(run),
        "queues": _curves(run, queues, asked.points),
        "workers": _workers(run, points=asked.points),
        "problems": [
            *block_problems(database.damage, run.path, "gauges"),
            *incomplete_lines(database, run.path, "gauges"),
            *run.line_problems(),
        ],
        "hints": _hints(asked, found),
    }


def _hints(asked: InfraParameters, found: JsonObject) -> list[str]:
    sources = [one["source"] for one in found["sources"]]
    known = {"source": sources, "name": found["names"]}
    return list(unfit({"source": asked.source, "name": asked.name}, known))


def _extent(database: Database, gauges: Source) -> Window | None:
    low, high = database.rows(f"SELECT min(time_s), max(time_s) FROM {gauges.sql}", gauges.values)[
        0
    ]
    return None if low is None else Window(first_s=low, last_s=high)


def kind_of_source(source: str) -> str:
    """Return the kind of a source: `gpu`, `node`, `server`, `driver` or `other`."""
    words = source.split(" ")
    if words[0] == "node":
        return "gpu" if "gpu" in words[2:] else "node"
    if "://" in source:
        return "server"
    return "driver" if source == "driver" else "other"


def _gauges(
    database: Database, gauges: Source, window: Window, asked: InfraParameters
) -> JsonObject:
    sql = (
        "SELECT source, name, arg_max(value, time_s), avg(value) FROM "
        f"{gauges.sql} WHERE time_s BETWEEN ? AND ? GROUP BY source, name ORDER BY source, name"
    )
    rows = database.rows(sql, (*gauges.values, window.first_s, window.last_s))
    latest: dict[str, JsonObject] = {}
    for source, name, value, _ in rows:
        latest.setdefault(source, {})[name] = value
    is_fleet = sum(kind_of_source(source) == "gpu" for source in latest) > FLEET
    outliers = _outliers(rows)
    chosen = list(asked.source)
    if is_fleet and not chosen:
        chosen = list(dict.fromkeys(one["source"] for one in outliers))
        chosen += [source for source in latest if kind_of_source(source) != "gpu"]
    elif not chosen:
        chosen = list(latest)
    return {
        "sources": [
            {"source": source, "kind": kind_of_source(source), "latest": values}
            for source, values in latest.items()
        ],
        "names": sorted({name for values in latest.values() for name in values}),
        "is_fleet": is_fleet,
        "series": _series(database, gauges, window, asked, chosen),
        "fleet": _fleet(database, gauges, window, asked) if is_fleet else [],
        "outliers": outliers,
    }


def _series(
    database: Database,
    gauges: Source,
    window: Window,
    asked: InfraParameters,
    chosen: Sequence[str],
) -> list[JsonObject]:
    width_s = window.length_s / asked.points
    named = "AND name IN (SELECT unnest(?)) " if asked.name else ""
    sql = (
        "SELECT source, name, min(time_s), avg(value), min(value), max(value) FROM "
        f"{gauges.sql} WHERE time_s BETWEEN ? AND ? AND source IN (SELECT unnest(?)) {named}"
        "GROUP BY source, name, CAST(floor((time_s - ?) / ?) AS BIGINT) ORDER BY 1, 2, 3"
    )
    bound: list[object] = [*gauges.values, window.first_s, window.last_s, list(chosen)]
    bound += [asked.name] if asked.name else []
    bound += [window.first_s, width_s]
    found: dict[tuple[str, str], JsonObject] = {}
    for source, name, time_s, mean, low, high in database.rows(sql, bound):
        if (source, name) not in found and len(found) >= _MAX_SERIES:
            continue
        empty: JsonObject = {"times_s": [], "mean": [], "minimum": [], "maximum": []}
        one = found.setdefault((source, name), {"source": source, "name": name, **empty})
        for column, value in zip(empty, (time_s, mean, low, high), strict=True):
            one[column].append(value)
    return list(found.values())


def _fleet(
    database: Database, gauges: Source, window: Window, asked: InfraParameters
) -> list[JsonObject]:
    """Return the quantiles over all GPUs of each meter, over time."""
    width_s = window.length_s / asked.points
    sql = (
        "SELECT name, min(time_s), quantile_cont(value, [0.1, 0.5, 0.9]) FROM "
        f"{gauges.sql} WHERE time_s BETWEEN ? AND ? AND source LIKE 'node % gpu %' "
        "GROUP BY name, CAST(floor((time_s - ?) / ?) AS BIGINT) ORDER BY 1, 2"
    )
    bound = (*gauges.values, window.first_s, window.last_s, window.first_s, width_s)
    found: dict[str, JsonObject] = {}
    for name, time_s, quantiles in database.rows(sql, bound):
        empty: JsonObject = {"times_s": [], "p10": [], "p50": [], "p90": []}
        one = found.setdefault(name, {"kind": "gpu", "name": name, **empty})
        for column, value in zip(empty, (time_s, *quantiles), strict=True):
            one[column].append(value)
    return [one for one in found.values() if not asked.name or one["name"] in asked.name]


def _outliers(rows: Sequence[tuple[Any, ...]]) -> list[JsonObject]:
    """Return the sources whose mean is far from the median of their kind, farthest first."""
    by_meter: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for source, name, _, mean in rows:
        by_meter.setdefault((kind_of_source(source), name), []).append((source, mean))
    found: list[JsonObject] = []
    for (_, name), values in by_meter.items():
        if len(values) < 4:
            continue
        middle = median([value for _, value in values])
        spread, least = _spread([value for _, value in values], middle)
        for source, value in values:
            if spread > 0 and abs(value - middle) >= least:
                deviations = (value - middle) / spread
                about = {"source": source, "name": name, "value": value, "median": middle}
                found.append({**about, "deviations": deviations})
    return sorted(found, key=lambda one: -abs(one["deviations"]))[:_MAX_OUTLIERS]


def _spread(values: Sequence[float], middle: float) -> tuple[float, float]:
    """Return the deviation of values from their median, as a standard deviation, and a limit.

    If more than half of them are the same, as clocks are, their median distance is 0. The mean
    distance then replaces it, and a value must also differ by a share of itself to be far away.
    """
    distances = [abs(value - middle) for value in values]
    spread = 1.4826 * median(distances)
    if spread > 0:
        return spread, _LEAST_DEVIATIONS * spread
    spread = 1.2533 * sum(distances) / len(distances)
    return spread, max(_LEAST_OF_MEAN * spread, _LEAST_SHARE * abs(middle))


def _servers(run: OneRun) -> list[JsonObject]:
    by_server: dict[str, list[JsonObject]] = {}
    for event in server_events(run):
        by_server.setdefault(str(event["server"]), []).append(event)
    found = [_server(name, states) for name, states in sorted(by_server.items())]
    info = run.info()
    if info.observed_state is RunState.RUNNING:
        return found
    # Servers end with their run, and record only what they did before.
    end = {"state": "ended", "since_s": seconds_of(info.ended_at)}
    return [one if one["state"] in _LOST else one | end for one in found]


def _server(name: str, states: Sequence[JsonObject]) -> JsonObject:
    last = states[-1]
    about = {key: last[key] for key in ("role", "life", "state", "version", "reason")}
    rows = [[state[key] for key in _STATES] for state in states]
    return {
        **{"server": name, **about, "since_s": last["time_s"]},
        "num_lives": max(state["life"] for state in states),
        "states": {"columns": queries.as_columns(_STATES, rows)},
    }


def _workers(run: OneRun, *, points: int) -> list[JsonObject]:
    """Return the metrics of each environment's processes, over steps and at the newest."""
    by_environment: dict[str, list[str]] = {}
    for name in run.metrics.names():
        environment, found, meter = name.removeprefix(_WORKERS).rpartition("/")
        if name.startswith(_WORKERS) and found and meter:
            by_environment.setdefault(environment, []).append(name)
    return [
        {
            "environment": environment,
            "latest": {name.rpartition("/")[2]: run.metrics.latest(name) for name in names},
            "curves": _curves(run, names, points),
        }
        for environment, names in sorted(by_environment.items())
    ]


def _curves(run: OneRun, names: Sequence[str], points: int) -> JsonObject:
    columns = run.metrics.columns(names)
    return shared_curves(columns.steps, columns.values, Drawn(points, smooth=1))
