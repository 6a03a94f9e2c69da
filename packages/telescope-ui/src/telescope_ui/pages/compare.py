"""`/compare`: curves of several runs over each other, and the settings that differ."""

from collections.abc import Sequence

from telescope_core.settings.differing import differing
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import curve
from telescope_ui.base.parameters import CompareParameters
from telescope_ui.index.one_run import OneRun
from telescope_ui.pages.overview import usual


def compare_page(runs: Sequence[OneRun], asked: CompareParameters) -> JsonObject:
    """Return the curves of `runs`, and what differs in their settings."""
    names = {run.key: set(run.metrics.names()) for run in runs}
    known = sorted(set[str]().union(*names.values()))
    chosen = asked.metric or usual(known)
    curves: JsonObject = {name: [] for name in chosen}
    for name in chosen:
        for run in runs:
            if name in names[run.key]:
                columns = run.metrics.columns([name])
                one = curve(columns.steps, columns.values[name], points=asked.points)
                curves[name].append({"run": run.key, **one})
    settings, num_equal = differing({run.key: run.config() for run in runs})
    return {
        "page": "compare",
        "runs": [{**run.brief(), "step": run.metrics.last_step()} for run in runs],
        "metric_names": known,
        "curves": curves,
        "settings": [one._asdict() for one in settings],
        "num_equal_settings": num_equal,
    }
