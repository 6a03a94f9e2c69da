"""The course of the reward, in total and for each environment, with its evals and intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from telescope_core.evals.distributions import t_quantile
from telescope_core.evals.stats import CONFIDENCE
from telescope_core.reports.overview import edge_means
from telescope_core.reports.verdict import REWARDS
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.curves import Drawn, shared_curves
from telescope_ui.index.filters import has_signal
from telescope_ui.index.one_run import OneRun
from telescope_ui.pages.judged import eval_results
from telescope_ui.pages.runs import environment_names

_NUM_STEPS = 10
"""Number of newest steps for the shares of an environment."""
_SPREAD = "count(*), avg(mean), var_pop(mean)"
_TAIL = (1 - CONFIDENCE) / 2
_NO_SPREAD = 1e-18
"""Variance of values between 0 and 1 that is due to rounding alone."""


def reward_course(run: OneRun, drawn: Drawn) -> JsonObject:
    """Return the reward of all environments over steps, and the steps without training."""
    sql = f"SELECT step, {_SPREAD} FROM {{groups}} GROUP BY step ORDER BY step"
    spread = {step: tuple(of_step) for step, *of_step in run.index.rows(sql)}
    return {**_course(run, None, spread, drawn), "untrained": untrained(run)}


def environment_courses(run: OneRun, drawn: Drawn) -> list[JsonObject]:
    """Return the reward of each environment over steps, and shares of its newest rollouts."""
    spreads: dict[str, dict[int, tuple[int, float, float]]] = {}
    sql = (
        f"SELECT environment, step, {_SPREAD} FROM {{groups}} "
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
    # Groups that were rejected have no place in the batch: other ones took it.
    rejected = "bool_or(status = 'discarded' AND status_reason != 'too_few' AND advantage IS NULL)"
    taught = has_signal(is_discarding=run.is_discarding())
    signal: list[Any] = run.index.rows(
        "SELECT environment, avg(CAST(is_taught AS DOUBLE)) FROM ("
        f"SELECT environment, {taught} AS is_taught FROM {{rollouts}} "
        "WHERE step > ? AND NOT is_replaced GROUP BY step, environment, group_id "
        f"HAVING NOT {rejected}) GROUP BY environment",
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


class Band(NamedTuple):
    """Both ends of the interval; None if one group alone shows no spread."""

    low: float | None
    high: float | None


def band(num: int, mean: float, variance: float, reward_range: tuple[float, float] | None) -> Band:
    """Return the 95% interval of the mean over `num` groups whose means have `variance`.

    `variance` is the mean squared distance from `mean`. If the range of values is known, the
    interval is Student's t for the log of the odds, `log(p / (1 - p))` of the place `p` in the
    range, by the delta method. Otherwise it is Student's t for the mean, which may reach values
    that the reward cannot have. The intervals of evals look at single rewards
    (`telescope_core.evals.stats`), which takes too long for every step of a run.
    """
    if num < 2:
        return Band(None, None)
    quantile = t_quantile(1 - _TAIL, num - 1)
    if reward_range is None:
        reach = quantile * math.sqrt(variance / (num - 1))
        return Band(mean - reach, mean + reach)
    minimum, maximum = reward_range
    span = maximum - minimum
    place = min(1.0, max(0.0, (mean - minimum) / span))
    low, high = _places(num, place, variance / span / span, quantile)
    # Rounding must not push the mean out of its own interval.
    return Band(min(mean, minimum + span * low), max(mean, minimum + span * high))


def _places(num: int, place: float, variance: float, quantile: float) -> tuple[float, float]:
    """Return the interval of a mean between 0 and 1."""
    if variance <= _NO_SPREAD or not 0.0 < place < 1.0:
        # Groups that are all alike: the exact binomial bound on the share of others, times the
        # distance to each end.
        share = 1.0 - _TAIL ** (1.0 / num)
        return place - share * place, place + share * (1.0 - place)
    odds = place / (1.0 - place)
    reach = quantile * math.sqrt(variance / (num - 1)) / (place * (1.0 - place))
    # Beyond this, the ends are 0 and 1 to the last digit.
    factor = math.exp(min(reach, 300.0))
    return odds / (odds + factor), odds * factor / (1.0 + odds * factor)
