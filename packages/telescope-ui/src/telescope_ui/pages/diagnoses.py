"""What is wrong with a run, by the rules of `telescope doctor`, computed from its metrics.

So runs of earlier versions, and runs that were killed, have findings too.
"""

from collections.abc import Sequence

from telescope_core.diagnosis import History, diagnose
from telescope_ui.base.answers import JsonObject
from telescope_ui.index.one_run import OneRun


def diagnoses(run: OneRun, metrics: Sequence[str]) -> list[JsonObject]:
    """Return the findings over `metrics`, the names of all of them; see `Finding.as_json`."""
    columns = run.metrics.columns(metrics)
    found = diagnose(History(columns.steps, columns.values))
    # Links to curves name only those that the run has.
    known = [[name for name in one.metrics if name in columns.values] for one in found]
    return [one.as_json() | {"metrics": names} for one, names in zip(found, known, strict=True)]
