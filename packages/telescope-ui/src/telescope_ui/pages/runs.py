"""`/`: all runs and evals, newest change first, and runs that differ only in their seed."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from telescope_core.base.errors import TelescopeError
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import curve
from telescope_ui.files.eval_files import main_estimate, problem_of, result_of, rows_of
from telescope_ui.files.run_files import stamp_of
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


class _Reading:
    """Reads what a list shows of its runs until the time is over; kept results take none."""

    def __init__(self, most_s: float) -> None:
        self._left_s = most_s
        self.num_unread = 0

    def kept(
        self, one: OneRun, names: Sequence[str], read: Callable[[], JsonObject]
    ) -> JsonObject | None:
        """Return the result of `read` for the present files `names`; None if there is no time."""
        stamps = [stamp_of(one.path / name) for name in names]
        if one.is_kept(stamps):
            return one.kept(stamps, read)
        if self._left_s <= 0:
            self.num_unread += 1
            return None
        began_s = time.monotonic()
        found = one.kept(stamps, read)
        self._left_s -= time.monotonic() - began_s
        return found


def runs_page(runs: Runs, *, most_s: float = math.inf) -> JsonObject:
    """Return runs and evals, newest change first; an unreadable one is listed with the reason.

    Files that changed are read for at most about `most_s`, those of the newest runs first. Rows
    that wait have a name and a state alone, and `index` says how many are read.
    """
    reading = _Reading(most_s)
    changed = [(one.changed_s(), one) for one in runs.look()]
    found: list[JsonObject] = []
    evals: list[JsonObject] = []
    for changed_s, one in sorted(changed, key=lambda each: (-each[0], each[1].key)):
        rows = evals if isinstance(one, OneEval) else found
        rows.append({**_row(one, reading), "changed_s": changed_s})
    return {
        "page": "runs",
        "folders": [str(folder) for folder in runs.folders],
        "left_out": [str(link) for link in runs.left_out],
        "runs": found,
        "seeds": _seeds(found, {one.key: one.opened for _, one in changed}),
        "evals": evals,
        "index": {
            "files_done": len(changed) - reading.num_unread,
            "files_total": len(changed),
            "is_complete": not reading.num_unread,
            "problems": [],
        },
    }


def _row(one: OneRun, reading: _Reading) -> JsonObject:
    is_eval = isinstance(one, OneEval)
    row: JsonObject = {
        **{"key": one.key, "folder": str(one.named), "environments": [], "error": None},
        **dict.fromkeys(_OF_EVAL if is_eval else _OF_RUN),
    }
    try:
        return row | (_facts_of_eval(one, reading) if is_eval else _facts_of_run(one, reading))
    except (TelescopeError, OSError) as error:
        return {**row, "name": one.path.name, "state": "unreadable", "error": str(error)}


def _facts_of_run(run: OneRun, reading: _Reading) -> JsonObject:
    info = run.info()

    def read() -> JsonObject:
        steps, values = run.course.reward()
        return {
            "reason": info.observed_reason,
            "started_at": info.started_at,
            "ended_at": info.ended_at,
            "step": run.course.last_step(),
            "environments": list(info.environments) or environment_names(run),
            **settings_of(run),
            "reward": values[-1] if values else None,
            "recent_reward": statistics.fmean(values[-RECENT:]) if values else None,
            "curve": curve(steps, values, points=_POINTS),
        }

    return {
        **(reading.kept(run, ("run.json", "config.json", "metrics.jsonl"), read) or {}),
        "name": info.name,
        "seeds": seeds_of(info.name, run.path),
        # Whether its process is there says no file.
        "state": info.observed_state.value,
    }


def _facts_of_eval(one: OneEval, reading: _Reading) -> JsonObject:
    brief = one.brief()

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
            "error": problem_of(one.place) or None,
        }
        if result is None:
            return found
        same = ("environment", "model", "num_tasks", "num_rollouts", "num_scored", "num_failed")
        return found | {name: getattr(result, name) for name in same} | main_estimate(result)

    kept = reading.kept(one, ("eval.json", "results.json", "rollouts.jsonl"), read)
    return {**(kept or {}), **brief}


def seeds_of(name: str, path: Path) -> str | None:
    """Return the common part of the names of runs with different seeds; None if there is none.

    `NAME-seed3` is of `NAME-seed*`, and a folder `NAME/seed3` of `NAME/seed*`.
    """
    match = _SEED.fullmatch(name)
    if match is None:
        return None
    return f"{match['name']}-seed*" if match["name"] else f"{path.parent.name}/seed*"


def _seeds(rows: Sequence[JsonObject], opened: Mapping[str, Path]) -> list[JsonObject]:
    """Return the runs of each name with several seeds, and the spread of their rewards.

    `opened` has the opened folder of each key: runs of two of them are not taken together.
    """
    by_name: dict[tuple[str, str], list[JsonObject]] = {}
    for row in rows:
        if row["seeds"] is not None:
            by_name.setdefault((str(opened[row["key"]]), row["seeds"]), []).append(row)
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
