"""The course of the reward, in total and for each environment, with its evals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from telescope_core.reports.overview import edge_means
from telescope_core.reports.verdict import REWARDS
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.bands import Band, band
from telescope_ui.base.curves import Drawn, shared_curves
from telescope_ui.index.one_run import OneRun
from telescope_ui.pages.runs import environment_names
from telescope_ui.pages.verdicts import eval_results

_NUM_STEPS = 10
"""Number of newest steps for the shares of an environment."""


def reward_course(run: OneRun, drawn: Drawn) -> JsonObject:
    """Return the reward of all environments over steps, and the steps without training."""
    found = _course(run, None, {}, drawn)
    return {**found, "untrained": untrained(run)}


def environment_courses(run: OneRun, drawn: Drawn) -> list[JsonObject]:
    """Return the reward of each environment over steps, and shares of its newest rollouts."""
    spreads: dict[str, dict[int, tuple[int, float, float]]] = {}
    sql = (
        "SELECT environment, step, count(*), avg(mean), var_pop(mean) FROM {groups} "
        "GROUP BY environment, step ORDER BY environment, step"
    )
    for environment, step, *spread in run.index.rows(sql):
        spreads.setdefault(environment, {})[step] = tuple(spread)
    known = set(run.metrics.names())
    for environment in environment_names(run):
        if any(_measure(name, environment) in known for name in REWARDS):
            spreads.setdefault(environment, {})
    shares = _newest_shares(run)
    none: JsonObject = {"signal": None, "truncated": None}
    return [
        {**_course(run, name, spreads[name], drawn), **none, **shares.get(name, {})}
        for name in sorted(spreads)
    ]


def evals_on_course(run: OneRun, points: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the mean reward of each eval with its interval, at the step of its weights.

    `points`: what became of each eval, with its folder.
    """
    versions = {point["folder"]: point.get("version") for point in points}
    found: list[JsonObject] = []
    for folder, result in eval_results(run).items():
        version = versions.get(folder)
        if result.reward is None or version is None:
            continue
        about = {"environment": result.environment, "folder": folder, "step": version}
        address = run.address("evals", folder)
        found.append({**about, "address": address, **asdict(result.reward)})
    return found


def _course(
    run: OneRun,
    environment: str | None,
    spread: Mapping[int, tuple[int, float, float]],
    drawn: Drawn,
) -> JsonObject:
    """Return one course; `spread`: number, mean and variance of the groups of steps."""
    steps, values, times = _values(run, environment, spread)
    curves = shared_curves(steps, {"reward": values, "time_s": times}, drawn)
    reward_range = _range(run, environment)
    bands = [
        band(spread[step][0], mean, spread[step][2], reward_range)
        if step in spread and not math.isnan(mean)
        else Band(None, None)
        for step, mean in zip(curves["steps"], curves["metrics"]["reward"], strict=True)
    ]
    edges = edge_means([None if math.isnan(value) else value for value in values])
    return {
        "environment": environment,
        "steps": curves["steps"],
        "mean": curves["metrics"]["reward"],
        "smooth": curves["smooth"].get("reward", []),
        "smooth_steps": curves["smooth_steps"],
        "times_s": curves["metrics"]["time_s"],
        "low": [one.low for one in bands],
        "high": [one.high for one in bands],
        "num_groups": [spread[step][0] if step in spread else None for step in curves["steps"]],
        "range": reward_range,
        **{"first": edges.first, "last": edges.last, "compared_steps": edges.num_steps},
        "is_thinned": curves["is_thinned"],
    }


def _values(
    run: OneRun, environment: str | None, spread: Mapping[int, tuple[int, float, float]]
) -> tuple[Sequence[int], Sequence[float], Sequence[float]]:
    """Return steps, rewards and times: of the metrics, or else of the groups."""
    known = set(run.metrics.names())
    wanted = [_measure(name, environment) for name in REWARDS]
    name = next((name for name in wanted if name in known), None)
    with_time = ["time_s"] if "time_s" in known else []
    columns = run.metrics.columns([*([name] if name else []), *with_time])
    if name is not None:
        times = columns.values.get("time_s", [math.nan] * len(columns.steps))
        return columns.steps, columns.values[name], times
    time_of = dict(zip(columns.steps, columns.values.get("time_s", []), strict=False))
    return (
        list(spread),
        [one[1] for one in spread.values()],
        [time_of.get(step, math.nan) for step in spread],
    )


def _measure(name: str, environment: str | None) -> str:
    """Return the metric `name` of one environment; of all for None."""
    if environment is None:
        return name
    before, slash, after = name.partition("/")
    return f"{before}/{environment}{slash}{after}"


def _range(run: OneRun, environment: str | None) -> tuple[float, float] | None:
    """Return the least and the largest possible reward; None if not known."""
    ranges = run.info().reward_ranges
    if environment is not None:
        return ranges.get(environment)
    if not ranges:
        return None
    return min(low for low, _ in ranges.values()), max(high for _, high in ranges.values())


def untrained(run: OneRun) -> list[tuple[int, int]]:
    """Return the ranges of steps without an optimizer step, as far as known."""
    names = run.metrics.names()
    if "groups/total" not in names:
        return []
    has_loss = "loss/total" in names
    columns = run.metrics.columns(["groups/total", *(["loss/total"] if has_loss else [])])
    found: list[tuple[int, int]] = []
    is_open = False
    for at, step in enumerate(columns.steps):
        is_trained = has_loss and not math.isnan(columns.values["loss/total"][at])
        if is_trained or math.isnan(columns.values["groups/total"][at]):
            is_open = False
        elif is_open:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
            is_open = True
    return found


def _newest_shares(run: OneRun) -> dict[str, JsonObject]:
    """Return the share of groups with a signal, and of cut rollouts, by environment."""
    since = run.metrics.last_step() - _NUM_STEPS
    signal: list[Any] = run.index.rows(
        "SELECT environment, avg(CAST(minimum < maximum AS DOUBLE)) FROM {groups} "
        "WHERE step > ? GROUP BY environment",
        [since],
    )
    cut: list[Any] = run.index.rows(
        "SELECT environment, avg(CAST(is_truncated AS DOUBLE)) FROM {rollouts} "
        "WHERE step > ? AND NOT is_replaced GROUP BY environment",
        [since],
    )
    found: dict[str, JsonObject] = {name: {"signal": share} for name, share in signal}
    for name, share in cut:
        found.setdefault(name, {})["truncated"] = share
    return found
