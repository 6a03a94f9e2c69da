"""`/compare`: curves of several runs over each other, and the settings that differ."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

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
        "settings": settings,
        "num_equal_settings": num_equal,
    }


def differing(configs: Mapping[str, Mapping[str, Any]]) -> tuple[list[JsonObject], int]:
    """Return (settings that differ, number of those that are equal)."""
    flat = {key: flat_settings(config) for key, config in configs.items()}
    names = dict.fromkeys(name for settings in flat.values() for name in settings)
    found: list[JsonObject] = []
    for name in names:
        values = {key: settings[name] for key, settings in flat.items() if name in settings}
        first = next(iter(values.values()))
        if len(values) < len(flat) or any(value != first for value in values.values()):
            found.append({"name": name, "values": values})
    return found, len(names) - len(found)


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by `section.key`; lists of tables are numbered."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= flat_settings(cast(dict[str, Any], value), f"{full}.")
        elif isinstance(value, list) and _has_tables(cast(list[Any], value)):
            for number, one in enumerate(cast(list[dict[str, Any]], value)):
                called = one.get("name", number)
                found |= flat_settings(one, f"{full}.{called}.")
        else:
            found[full] = value
    return found


def _has_tables(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)
