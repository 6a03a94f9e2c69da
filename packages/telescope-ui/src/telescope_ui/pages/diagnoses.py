"""What a run found wrong with itself while it went on, as it said in the log of its driver.

Rules look at the metrics of each step, and say once what is wrong and what to do about it.
"""

from collections.abc import Collection

from telescope_ui.answers import JsonObject
from telescope_ui.one_run import OneRun

_MAX = 50


def diagnoses(run: OneRun, metrics: Collection[str]) -> list[JsonObject]:
    """Return the warnings of the driver that begin with one of `metrics`, the newest first."""
    known = set(metrics)
    found: dict[tuple[float, str], JsonObject] = {}
    for one in run.warnings.rows():
        metric, is_there, text = one.message.partition(": ")
        if is_there and metric in known:
            about = {"time_s": one.time_s, "metric": metric, "text": text}
            # A file that is being renamed may be seen under both of its names.
            found[one.time_s, one.message] = about
    return list(reversed(found.values()))[:_MAX]
