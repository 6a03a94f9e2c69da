"""Choose the rollouts of a report: early and late, good and bad, of every environment."""

from collections.abc import Sequence
from itertools import zip_longest

from telescope_core.records.rows import RolloutRow
from telescope_core.records.run_folder import RunFolder

NUM_SAMPLES = 100
"""Rollouts in the report of a run or an eval."""


def run_samples(run: RunFolder) -> list[RolloutRow]:
    """Return rollouts of `run`, half from its first step and half from its last."""
    steps = run.rollout_steps()
    if not steps:
        return []
    if len(steps) == 1:
        return pick(run.rollouts(steps, with_tokens=False), NUM_SAMPLES)
    early = pick(run.rollouts(steps[:1], with_tokens=False), NUM_SAMPLES // 2)
    return early + pick(run.rollouts(steps[-1:], with_tokens=False), NUM_SAMPLES - len(early))


def pick(rows: Sequence[RolloutRow], count: int) -> list[RolloutRow]:
    """Return up to `count` rows, taken in turn from each environment: best, worst, next best..."""
    by_environment: dict[str, list[RolloutRow]] = {}
    for row in rows:
        if row.messages:
            by_environment.setdefault(row.environment, []).append(row)
    queues = [_best_and_worst(group) for _, group in sorted(by_environment.items())]
    mixed = [row for turn in zip_longest(*queues) for row in turn if row is not None]
    return mixed[:count]


def _best_and_worst(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    """Order rows as best, worst, second best...; then repeated examples, then failures."""
    scored = [row for row in rows if row.reward is not None]
    ranked = sorted(scored, key=lambda row: (-(row.reward or 0.0), row.group_id, row.index))
    alternating: list[RolloutRow] = []
    while ranked:
        alternating.append(ranked.pop(0 if len(alternating) % 2 == 0 else -1))
    seen: set[str] = set()
    fresh: list[RolloutRow] = []
    again: list[RolloutRow] = []
    for row in alternating:
        (again if row.group_id in seen else fresh).append(row)
        seen.add(row.group_id)
    return fresh + again + [row for row in rows if row.reward is None]
