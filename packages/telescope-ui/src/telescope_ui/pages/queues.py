"""Queues of the sampler, and processes of environments, step by step."""

from collections.abc import Sequence

from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import Drawn, shared_curves
from telescope_ui.index.one_run import OneRun

_QUEUES = "queue/"
_WORKERS = "workers/"


def queues_of(run: OneRun, *, points: int) -> JsonObject:
    """Return the curves of all metrics of queues, over steps."""
    names = [name for name in run.metrics.names() if name.startswith(_QUEUES)]
    return _curves(run, names, points)


def workers_of(run: OneRun, *, points: int) -> list[JsonObject]:
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
