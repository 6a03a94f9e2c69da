"""`/`: all runs, newest change first."""

from telescope_core.errors import TelescopeError
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import curve
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.runs import Runs

REWARDS = ("task_reward/mean", "reward/mean")
"""Metrics that say how good the policy is; the first one that is there counts."""
_POINTS = 60
_NOTHING = (
    *("reason", "started_at", "ended_at", "step", "number_of_steps", "model", "algorithm"),
    *("reward", "curve"),
)


def runs_page(runs: Runs) -> JsonObject:
    """Return the runs; one that cannot be read says why, and the others are there."""
    found = [_row(run) for run in runs.all()]
    return {
        "page": "runs",
        "folders": [str(folder) for folder in runs.folders],
        "runs": sorted(found, key=lambda row: (-row["changed_s"], row["key"])),
    }


def _row(run: OneRun) -> JsonObject:
    base: JsonObject = {"key": run.key, "folder": str(run.opened), "changed_s": run.changed_s()}
    try:
        return {**base, **_facts(run), "error": None}
    except (TelescopeError, OSError) as error:
        name: JsonObject = {"name": run.path.name, "state": "unreadable", "environments": []}
        return {**base, **name, **dict.fromkeys(_NOTHING), "error": str(error)}


def _facts(run: OneRun) -> JsonObject:
    info = run.info()
    names = run.metrics.names()
    reward = next((name for name in REWARDS if name in names), None)
    found: JsonObject = {"steps": [], "values": [], "is_thinned": False}
    if reward is not None:
        columns = run.metrics.columns([reward])
        found = curve(columns.steps, columns.values[reward], points=_POINTS)
    return {
        "name": info.name,
        "state": info.observed_state.value,
        "reason": info.reason,
        "started_at": info.started_at,
        "ended_at": info.ended_at,
        "step": run.metrics.last_step(),
        "environments": list(info.environments) or environment_names(run),
        **settings_of(run),
        "reward": None if reward is None else run.metrics.latest(reward),
        "curve": found,
    }


def settings_of(run: OneRun) -> JsonObject:
    """Return the settings that tell runs apart."""
    return {
        "number_of_steps": run.setting("run.number_of_steps"),
        "model": run.setting("model.model"),
        "algorithm": run.setting("algorithm.algorithm"),
    }


def environment_names(run: OneRun) -> list[str]:
    """Return the environments that have a reward among the metrics."""
    return [
        name.removeprefix("reward/").removesuffix("/mean")
        for name in run.metrics.names()
        if name.startswith("reward/") and name.endswith("/mean") and name.count("/") > 1
    ]
