"""The health of a run by its newest steps, and the division of its time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from telescope_core.reports.before_after import AFTER, BEFORE
from telescope_core.reports.overview import edge_means
from telescope_core.reports.train_report import TIME_PARTS
from telescope_ui.base.answers import JsonObject
from telescope_ui.index.one_run import OneRun

_NUM_STEPS = 10
"""Number of newest steps whose mean a tile shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """One tile; with limits, larger is worse, unless `is_low_bad`."""

    name: str
    metric: str
    unit: str
    """Unit; for shares, the name of the whole."""
    explanation: str
    and_metrics: tuple[str, ...] = ()
    """Metrics that are added to `metric`, also listed by its link."""
    share_of: str = ""
    """Metric by which the sum is divided."""
    is_share: bool = False
    watch: float | None = None
    bad: float | None = None
    is_low_bad: bool = False
    query: str = ""
    """Parameters of the rollouts page for the rollouts behind it."""


_RULES = (
    _Rule(
        name="Groups without a signal",
        metric="groups/all_equal",
        and_metrics=("groups/all_at_minimum", "groups/all_at_maximum", "groups/any_k_alike"),
        share_of="groups/total",
        unit="of groups",
        is_share=True,
        explanation="Groups whose rollouts all count the same, with penalties, teach nothing.",
        watch=0.6,
        bad=0.9,
        query="group=no_signal",
    ),
    _Rule(
        name="Truncated",
        metric="truncated/fraction",
        unit="of rollouts",
        is_share=True,
        explanation="Rollouts with a turn that max_tokens cut. Above 5% the limit shapes them.",
        watch=0.05,
        bad=0.5,
        query="truncated=true",
    ),
    _Rule(
        name="Failed attempts",
        metric="rollouts/failed_attempts",
        unit="a step",
        explanation="Attempts that ended without a score, whether or not a later one had one.",
        watch=1,
        query="attempts=all&status=failed",
    ),
    _Rule(
        name="Entropy",
        metric="entropy",
        unit="nats",
        explanation="Near 0 the policy always says the same, and explores no more.",
        watch=0.1,
        bad=0.02,
        is_low_bad=True,
    ),
    _Rule(
        name="Log-prob mismatch",
        metric="mismatch/mean",
        unit="nats",
        explanation="Distance of the sampler's log-probs to the trainer's, on the same weights.",
        watch=0.02,
        bad=0.1,
    ),
    _Rule(
        name="Effective sample size",
        metric="effective_sample_size",
        unit="",
        explanation="1 = on-policy; a low value means that few tokens carry the gradient.",
        watch=0.7,
        bad=0.3,
        is_low_bad=True,
    ),
    _Rule(
        name="Gradient norm",
        metric="grad_norm",
        unit="",
        explanation="Before clipping, mean over the optimizer steps.",
    ),
    _Rule(
        name="Staleness",
        metric="staleness/mean",
        unit="versions",
        explanation="Age of the weights that sampled the tokens, in updates.",
        watch=4,
        bad=16,
    ),
    _Rule(
        name="Branched turns",
        metric="turns/branched",
        unit="of turns",
        is_share=True,
        explanation="Turns whose prompt does not continue the tokens before it.",
        watch=0.05,
        bad=0.2,
    ),
    _Rule(
        name="Step",
        metric="time/step_s",
        unit="s",
        explanation="Duration of a whole step.",
    ),
    _Rule(
        name="Trainer waits",
        metric="time/generate_s",
        unit="s a step",
        explanation="Time that the trainer waited for rollouts.",
    ),
)


def tiles(run: OneRun) -> list[JsonObject]:
    """Return the tiles for metrics that the run has."""
    names = set(run.metrics.names())
    found: list[JsonObject] = []
    for rule in _RULES:
        if rule.metric not in names or (rule.share_of and rule.share_of not in names):
            continue
        parts = [name for name in (rule.metric, *rule.and_metrics) if name in names]
        wanted = [*parts, *([rule.share_of] if rule.share_of else [])]
        steps, columns = run.metrics.columns(wanted)
        sums = [_sum(columns[name][-_NUM_STEPS:]) for name in parts]
        total = math.fsum(one[0] for one in sums)
        count: float = max(one[1] for one in sums)
        if rule.share_of:
            count = _sum(columns[rule.share_of][-_NUM_STEPS:])[0]
        value = total / count if count else None
        newest = f"&step_from={steps[-_NUM_STEPS:][0]}"
        unit = rule.unit if value is not None else f"in the newest {len(steps[-_NUM_STEPS:])} steps"
        found.append(
            {
                **{"name": rule.name, "value": value, "unit": unit},
                **{"state": _state(rule, value), "explanation": rule.explanation},
                **{"metric": rule.metric, "is_share": rule.is_share},
                "address": f"{run.address('rollouts')}?{rule.query}{newest}" if rule.query else "",
            }
        )
    return found


def _sum(values: Sequence[float]) -> tuple[float, int]:
    """Return the sum of the numbers among `values`, and their number."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known), len(known)


def _state(rule: _Rule, value: float | None) -> str:
    if value is None or rule.watch is None:
        return "none"
    sign = -1 if rule.is_low_bad else 1
    if rule.bad is not None and sign * value >= sign * rule.bad:
        return "bad"
    return "watch" if sign * value >= sign * rule.watch else "good"


_BOUND_BY = {
    "time/generate_s": "rollouts",
    "time/train_s": "training",
    "time/sync_s": "the transfer of weights",
    "time/wait_s": "the driver",
}
"""Part of a step -> the bottleneck of a run in which that part is the longest."""


def time_spent(run: OneRun, points: Sequence[JsonObject]) -> JsonObject:
    """Return the division of the time of steps, and of evals before and after them.

    `points`: what became of each eval. Evals during training have a time of their own only where
    they hold it up, and that is in the transfer of weights.
    """
    names = set(run.metrics.names())
    wanted = [name for name in (*_BOUND_BY, "time/step_s", "tokens/rollout_per_s") if name in names]
    columns = run.metrics.columns(wanted)
    known = {
        name: [value for value in values if not math.isnan(value)]
        for name, values in columns.values.items()
    }
    parts = {key: math.fsum(known.get(key, ())) for key, _ in TIME_PARTS}
    evals_s = math.fsum(
        float(point["duration_s"])
        for point in points
        if point.get("tag") in (BEFORE, AFTER) and point.get("duration_s")
    )
    steps_s = edge_means(known.get("time/step_s", []))
    tokens = known.get("tokens/rollout_per_s", [])[-_NUM_STEPS:]
    longest = max(parts, key=lambda key: parts[key])
    return {
        "parts": [
            *({"name": text, "seconds": parts[key]} for key, text in TIME_PARTS),
            {"name": "evals before and after", "seconds": evals_s},
        ],
        "step_s": {"first": steps_s.first, "last": steps_s.last},
        "tokens_per_s": math.fsum(tokens) / len(tokens) if tokens else None,
        "bound_by": _BOUND_BY[longest] if parts[longest] else None,
    }
