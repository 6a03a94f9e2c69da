"""`/`: all runs and evals, newest change first, and runs that differ only in their seed."""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from telescope_core.base.errors import TelescopeError
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import curve
from telescope_ui.files.eval_files import main_estimate, result_of, rows_of
from telescope_ui.files.run_files import Stamp, stamp_of
from telescope_ui.index.one_eval import OneEval
from telescope_ui.index.one_run import OneRun, settings_of
from telescope_ui.index.runs import Runs

_POINTS = 60
RECENT = 10
"""Steps whose mean reward ranks runs: the reward of a single step is mostly chance."""
_OF_RUN = (
    *("reason", "started_at", "ended_at", "step", "number_of_steps", "model", "algorithm"),
    *("reward", "recent_reward", "curve", "seeds"),
)
_OF_EVAL = (
    *("reason", "started_at", "ended_at", "environment", "model", "measure", "mean", "low", "high"),
    *("num_tasks", "num_rollouts", "num_scored", "num_failed"),
)
_SEED = re.compile(r"(?i)(?P<name>.*?)[-_.]?seed[-_.=]?\d+")


def runs_page(runs: Runs) -> JsonObject:
    """Return runs and evals; an unreadable one is listed with the reason."""
    found = [_row(run, _facts_of_run, _OF_RUN) for run in runs.all()]
    evals = [_row(one, _facts_of_eval, _OF_EVAL) for one in runs.evals()]
    return {
        "page": "runs",
        "folders": [str(folder) for folder in runs.folders],
        "left_out": [str(link) for link in runs.left_out()],
        "runs": sorted(found, key=_newest_first),
        "seeds": _seeds(found),
        "evals": sorted(evals, key=_newest_first),
    }


def _newest_first(row: JsonObject) -> tuple[float, str]:
    return -row["changed_s"], row["key"]


def _row(one: OneRun, facts: Callable[[OneRun], JsonObject], names: Sequence[str]) -> JsonObject:
    base: JsonObject = {"key": one.key, "folder": str(one.opened), "changed_s": one.changed_s()}
    try:
        return {**base, **facts(one), "error": None}
    except (TelescopeError, OSError) as error:
        name: JsonObject = {"name": one.path.name, "state": "unreadable", "environments": []}
        return {**base, **name, **dict.fromkeys(names), "error": str(error)}


def _facts_of_run(run: OneRun) -> JsonObject:
    info = run.info()
    files = ("run.json", "config.json", "metrics.jsonl")

    def read() -> JsonObject:
        steps, values = run.course.reward()
        return {
            "name": info.name,
            "reason": info.reason,
            "started_at": info.started_at,
            "ended_at": info.ended_at,
            "step": run.course.last_step(),
            "environments": list(info.environments) or environment_names(run),
            **settings_of(run),
            "reward": values[-1] if values else None,
            "recent_reward": statistics.fmean(values[-RECENT:]) if values else None,
            "curve": curve(steps, values, points=_POINTS),
            "seeds": seeds_of(info.name, run.path),
        }

    # Whether its process is there says no file.
    return {**run.kept(_stamps(run, files), read), "state": info.observed_state.value}


def _facts_of_eval(one: OneRun) -> JsonObject:
    assert isinstance(one, OneEval), "only evals are in the list of evals"
    brief = one.brief()
    files = ("eval.json", "results.json", "rollouts.jsonl")

    def read() -> JsonObject:
        result = result_of(one.place)
        info = one.info() if brief["state"] else None
        asked = one.config()
        rows = [placed.row for placed in rows_of(one.place)] if result is None else []
        rewards = [row.reward for row in rows if row.reward is not None]
        found: JsonObject = {
            "reason": "" if info is None else info.reason,
            "started_at": None if info is None else info.started_at,
            "ended_at": None if info is None else info.ended_at,
            "environment": asked.get("environment"),
            "model": asked.get("model"),
            **dict.fromkeys(("measure", "mean", "low", "high", "num_tasks")),
            "num_rollouts": None,
            "num_scored": len(rewards),
            "num_failed": len(rows) - len(rewards),
        }
        if result is None:
            return found
        same = ("environment", "model", "num_tasks", "num_rollouts", "num_scored", "num_failed")
        return found | {name: getattr(result, name) for name in same} | main_estimate(result)

    return {**one.kept(_stamps(one, files), read), **brief}


def _stamps(one: OneRun, names: Sequence[str]) -> list[Stamp | None]:
    return [stamp_of(one.path / name) for name in names]


def seeds_of(name: str, path: Path) -> str | None:
    """Return the common part of the names of runs with different seeds; None if there is none.

    `NAME-seed3` is of `NAME-seed*`, and a folder `NAME/seed3` of `NAME/seed*`.
    """
    match = _SEED.fullmatch(name)
    if match is None:
        return None
    return f"{match['name']}-seed*" if match["name"] else f"{path.parent.name}/seed*"


def _seeds(rows: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the runs of each name with several seeds, and the spread of their rewards."""
    by_name: dict[tuple[str, str], list[JsonObject]] = {}
    for row in rows:
        if row["seeds"] is not None:
            by_name.setdefault((row["folder"], row["seeds"]), []).append(row)
    return [
        {
            "name": name,
            "runs": sorted(row["key"] for row in group),
            "recent_reward": _spread([row["recent_reward"] for row in group]),
        }
        for (_, name), group in sorted(by_name.items())
        if len(group) > 1
    ]


def _spread(found: Sequence[float | None]) -> JsonObject:
    values = [value for value in found if value is not None]
    return {
        "count": len(values),
        "mean": statistics.fmean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "minimum": min(values, default=None),
        "maximum": max(values, default=None),
    }


def environment_names(run: OneRun) -> list[str]:
    """Return the environments in the settings, or else those with a reward metric."""
    named: Any = run.config().get("environments")
    if isinstance(named, list) and named:
        sections = cast(list[dict[str, Any]], named)
        return [str(one["name"]) for one in sections if "name" in one]
    return [
        name.removeprefix("reward/").removesuffix("/mean")
        for name in run.metrics.names()
        if name.startswith("reward/") and name.endswith("/mean") and name.count("/") > 1
    ]
