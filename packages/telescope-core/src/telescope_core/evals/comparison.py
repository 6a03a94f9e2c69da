"""Compare two evals of the same examples by the difference of each task. Pure functions, no I/O.

Both evals meet the same easy and hard tasks, so the difference of each task varies much less than
the tasks do. Whether the intervals of the two means have values in common says little about it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from telescope_core.base.environment_record import changes
from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Sampling
from telescope_core.evals.distributions import incomplete_beta, t_quantile
from telescope_core.evals.result import EvalResult, TaskScore
from telescope_core.evals.stats import (
    CONFIDENCE,
    NORMAL_QUANTILE,
    Draws,
    are_alike,
    draws_of,
    end_weight,
    ends_of_constant,
    mean_distribution,
    most_common,
    pass_all_k,
    pass_at_k,
)

POWER = 0.8
"""Chance of finding the difference that is called detectable."""
_TAIL = (1.0 - CONFIDENCE) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One measure in two evals of the same tasks, and the mean difference between them."""

    measure: str
    """Name of the measure, such as `pass@1`."""
    before: float
    """Mean of the first eval over the tasks that both scored."""
    after: float
    """Mean of the second eval over the same tasks."""
    low: float | None
    """Lower end of the 95% interval of after - before; None with fewer than 2 tasks or clusters."""
    high: float | None
    """Upper end of the interval."""
    p: float | None
    """Probability of a difference at least this large, in either direction, if there is none in
    truth."""
    detectable: float | None
    """Least true difference that these tasks would show in 4 of 5 such comparisons.

    None where all tasks, or all clusters, changed by the same, so that no spread is seen, and where
    they are so few that even the largest difference that there can be would not be found so often.
    """
    num_tasks: int
    """Number of tasks that both evals scored."""
    num_clusters: int = 0
    """Number of clusters of these tasks; 0 if each task is independent of the others."""
    is_alike: bool = False
    """Whether all tasks changed by the same, as a single one does."""
    is_comparable: bool = True
    """Whether both evals measured the same thing. Not so if the environment's code changed: then
    the difference says nothing about the models."""

    @property
    def change(self) -> float:
        """Mean over tasks of after - before."""
        return self.after - self.before

    @property
    def is_shown(self) -> bool:
        """Whether the interval of the difference excludes zero, and the two can be compared."""
        if not self.is_comparable or self.low is None or self.high is None:
            return False
        return not self.low <= 0.0 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedEval:
    """One of the two evals of a comparison: its model, and how many of its rollouts count."""

    model: str
    num_rollouts: int
    """Number of rollouts requested."""
    num_scored: int
    num_failed: int
    """Rollouts without a reward."""

    @property
    def num_missing(self) -> int:
        """Rollouts that were not played."""
        return self.num_rollouts - self.num_scored - self.num_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evals of one environment, compared over the examples that both scored."""

    differences: tuple[Difference, ...]
    """One for each measure that both have: pass@k, pass^k, maj@k, reward."""
    before: ComparedEval
    after: ComparedEval
    num_only_before: int
    """Examples that only the first eval scored."""
    num_only_after: int
    """Examples that only the second eval scored."""
    code_changes: tuple[str, ...] = ()
    """Differences in the environment's code."""
    setting_changes: tuple[str, ...] = ()
    """Differences in how the rollouts were played, apart from their number."""
    is_graded_again: bool = False
    """Whether both have the same rollouts, graded with different code."""

    @property
    def main(self) -> Difference:
        """The difference of pass@k with the smallest k."""
        return self.differences[0]


def compare_results(
    before: EvalResult, after: EvalResult, *, is_graded_again: bool = False
) -> Comparison:
    """Compare two evals task by task; raises ConfigError when they have no example in common.

    `is_graded_again`: whether one has the rollouts of the other, graded with different code.
    """
    old, new = _scored(before), _scored(after)
    shared = [task_id for task_id in old if task_id in new]
    for result, scored in ((before, old), (after, new)):
        if not scored:
            raise ConfigError(
                f"the eval of {result.environment} with {result.model} has no scored rollout "
                f"({result.num_failed} failed), so there is nothing to compare; see why in its "
                "report, and play it again"
            )
    if not shared:
        raise ConfigError(
            f"expected two evals with examples in common, got {len(old)} scored examples of "
            f"{before.environment} and {len(new)} of {after.environment} with no id in both; "
            "evaluate both models on the same environment, split and examples"
        )
    pairs = [(old[task_id], new[task_id]) for task_id in shared]
    code = _code_changes(before, after)
    found = _differences(before, after, pairs)
    return Comparison(
        differences=tuple(replace(one, is_comparable=is_graded_again or not code) for one in found),
        before=_compared(before),
        after=_compared(after),
        num_only_before=len(old) - len(shared),
        num_only_after=len(new) - len(shared),
        code_changes=code,
        setting_changes=tuple(_setting_changes(before, after)),
        is_graded_again=is_graded_again,
    )


def _compared(result: EvalResult) -> ComparedEval:
    return ComparedEval(
        model=result.model,
        num_rollouts=result.num_rollouts,
        num_scored=result.num_scored,
        num_failed=result.num_failed,
    )


def paired_difference(
    measure: str,
    before_N: Sequence[float],
    after_N: Sequence[float],
    *,
    span: float = 1.0,
    rollouts: int = 1,
    clusters: Sequence[str] = (),
) -> Difference:
    """Return the mean difference of one value per task, with its interval and p.

    `span` is the largest difference that a task can have, and `rollouts` the number of each task's
    rollouts; `clusters` has the cluster of each task, as in `draws_of`. The interval is that of
    `stats.mean_distribution` for differences between -span and
    span. Where few tasks have changed, Student's t would leave out those that were not seen: gains
    of 5% of the tasks are outside of its interval in 1 of 8 evals of 64 tasks. If all tasks differ
    by the same, their spread is no evidence: the interval then includes the possible effect of
    unseen tasks (the exact binomial bound), and p is that of the sign test.
    """
    num_tasks = len(before_N)
    changes_N = [new - old for old, new in zip(before_N, after_N, strict=True)]
    span = max(span, *map(abs, changes_N)) or 1.0
    changes_N = [change / span for change in changes_N]
    mean = math.fsum(changes_N) / num_tasks
    draws = draws_of(changes_N, clusters)
    if len(draws.values) < 2:
        found = _Change(None, None, None, None)
    elif are_alike(draws.values):
        low, high = (2.0 * end - 1.0 for end in ends_of_constant((mean + 1.0) / 2, draws.number))
        p = 1.0 if are_alike([0.0, mean]) else min(1.0, 2.0 * 0.5**draws.number)
        found = _Change(low, high, p, None)
    else:
        found = _apart(draws, mean, rollouts)
    low, high, detectable = (
        None if one is None else span * one for one in (found.low, found.high, found.detectable)
    )
    return Difference(
        measure=measure,
        before=math.fsum(before_N) / num_tasks,
        after=math.fsum(after_N) / num_tasks,
        low=low,
        high=high,
        p=found.p,
        detectable=detectable,
        num_tasks=num_tasks,
        num_clusters=draws.num_clusters,
        is_alike=are_alike(changes_N),
    )


class _Change(NamedTuple):
    """What is known of a mean change between -1 and 1."""

    low: float | None
    high: float | None
    p: float | None
    detectable: float | None


def _apart(draws: Draws, mean: float, rollouts: int) -> _Change:
    """Return what is known of the mean where tasks change by different amounts."""
    weight = end_weight(draws._replace(values=[abs(one) for one in draws.values]), rollouts)
    shares = draws._replace(values=[(change + 1.0) / 2 for change in draws.values])
    found = mean_distribution(shares, weight)
    if found is None:
        return _Change(-1.0, 1.0, 1.0, None)
    low, high = (2.0 * end - 1.0 for end in found.ends)
    below = incomplete_beta(found.a, found.b, 0.5)
    # As for Student's t, of which the standard deviation has the widening already.
    power = t_quantile(POWER, draws.degrees) / t_quantile(1.0 - _TAIL, draws.degrees)
    detectable = 2.0 * found.sd * NORMAL_QUANTILE * (1.0 + power)
    return _Change(
        min(low, mean),
        max(high, mean),
        min(1.0, 2.0 * min(below, 1.0 - below)),
        detectable if detectable < 1.0 else None,
    )


def _scored(result: EvalResult) -> dict[str, TaskScore]:
    """Return the scored tasks by example id; rollouts of an id that repeats are one task."""
    found: dict[str, TaskScore] = {}
    for task in result.tasks:
        if not task.rewards or not task.example_id:
            continue
        known = found.get(task.example_id)
        found[task.example_id] = task if known is None else _joined(known, task)
    return found


def _joined(one: TaskScore, other: TaskScore) -> TaskScore:
    return TaskScore(
        example_id=one.example_id,
        rewards=one.rewards + other.rewards,
        num_solved=one.num_solved + other.num_solved,
        num_failed=one.num_failed + other.num_failed,
        cluster=one.cluster or other.cluster,
    )


def _differences(
    before: EvalResult, after: EvalResult, pairs: Sequence[tuple[TaskScore, TaskScore]]
) -> list[Difference]:
    found: list[Difference] = []
    shared_ks = sorted(set(before.pass_at) & set(after.pass_at))
    for sign, estimator in (("@", pass_at_k), ("^", pass_all_k)):
        for k in shared_ks:
            counted = [pair for pair in pairs if min(len(task.rewards) for task in pair) >= k]
            if not counted or (sign == "^" and k == 1):
                continue
            columns = [
                [estimator(len(pair[i].rewards), pair[i].num_solved, k) for pair in counted]
                for i in (0, 1)
            ]
            name, rollouts = f"pass{sign}{k}", _rollouts_of(counted)
            clusters = _clusters_of(counted)
            found.append(paired_difference(name, *columns, rollouts=rollouts, clusters=clusters))
    for k in sorted(set(before.majority_at) & set(after.majority_at)):
        voted = [pair for pair in pairs if all(k in task.majority for task in pair)]
        if voted:
            columns = [[pair[i].majority[k] for pair in voted] for i in (0, 1)]
            clusters = _clusters_of(voted)
            found.append(paired_difference(f"maj@{k}", *columns, clusters=clusters))
    old_N, new_N = ([math.fsum(p[i].rewards) / len(p[i].rewards) for p in pairs] for i in (0, 1))
    low = min(before.reward_min, after.reward_min)
    high = max(before.reward_max, after.reward_max)
    found.append(
        paired_difference(
            "reward",
            old_N,
            new_N,
            span=high - low,
            rollouts=_rollouts_of(pairs),
            clusters=_clusters_of(pairs),
        )
    )
    return found


def _clusters_of(pairs: Sequence[tuple[TaskScore, TaskScore]]) -> list[str]:
    """Return the cluster of each example; one of the evals may be from before it had one."""
    return [new.cluster or old.cluster for old, new in pairs]


def _rollouts_of(pairs: Sequence[tuple[TaskScore, TaskScore]]) -> int:
    """Return the rollouts of most tasks, in the eval that has fewer."""
    return most_common(min(len(task.rewards) for task in pair) for pair in pairs)


def _code_changes(before: EvalResult, after: EvalResult) -> tuple[str, ...]:
    old, new = before.environment_record, after.environment_record
    if old is not None and new is not None:
        return tuple(changes(old, new))
    one, other = (f"{r.environment} {r.environment_version}" for r in (before, after))
    return () if one == other else (f"environment: {one} -> {other}",)


def _setting_changes(before: EvalResult, after: EvalResult) -> list[str]:
    changed = _changed(_settings_that_matter(before), _settings_that_matter(after), "not set")
    old, new = before.environment_settings, after.environment_settings
    if old is None or new is None:
        return changed
    # The settings that were not given have the defaults of the environment's code.
    return changed + [f"env.{line}" for line in _changed(old, new, "not given")]


def _changed(old: Mapping[str, object], new: Mapping[str, object], absent: str) -> list[str]:
    return [
        f"{name}: {old.get(name, absent)} -> {new.get(name, absent)}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name, absent) != new.get(name, absent)
    ]


def _settings_that_matter(result: EvalResult) -> Mapping[str, object]:
    settings = result.settings
    template = f"file {result.chat_template}" if result.chat_template else "the model's own"
    return {
        "split": str(settings.split),
        **_sampled(settings.sampling),
        "chat template": template,
        "deadline_s": settings.deadline_s,
        "success_threshold": result.success_threshold,
    }


def _sampled(sampling: Sampling) -> dict[str, object]:
    """Return every sampling setting that is set, by name; others are left to the endpoint."""
    plain = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
    plain |= {"temperature": sampling.temperature_text, "stop": list(sampling.stop)}
    extra = dict(plain.pop("extra"))
    return {name: value for name, value in plain.items() if value not in (None, [])} | extra
