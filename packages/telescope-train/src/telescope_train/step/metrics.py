"""The row of metrics of one step, without the trainer's; docs/reference/metrics.md lists all.

Rewards, lengths, ends, failures and ages of rollouts; then what is answered and what the rewards
follow, for the rules of diagnosis. Answers are compared by their tokens. Letters: G scored rollouts
of one group.
"""

import asyncio
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.types import Group, Rollout, RolloutStatus, StopReason, WeightVersion
from telescope_train.algorithms.advantages import rounding
from telescope_train.batches.batch import StepPlan, TrainingSample
from telescope_train.rollouts.failures import Boundary
from telescope_train.rollouts.held_out import question_of
from telescope_train.rollouts.order import OFF_POLICY
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.step.credit import Credit
from telescope_train.step.throughput import Machine, throughput_metrics

LAPS = ("generate", "train", "sync", "wait")
"""Parts of the driver's time: waiting for rollouts that were not ready when training was,
training, publishing weights, and everything else (credit, packing, records)."""


_SPANS = {
    "generate": "wait for rollouts",
    "train": "train",
    "sync": "publish weights",
    "wait": "credit and packing",
}
"""Lap -> its name on the timeline of the run."""
FEWEST_PAIRS = 30
"""Least number of pairs of rollouts for a mean over pairs, so that one group does not decide."""
LONGEST_PERIOD, FEWEST_REPEATS, SHORTEST_LOOP = 16, 4, 8
"""Longest period of a loop, its least number of repetitions, and its least length in tokens."""


class StepClock:
    """Splits the time of one step: each lap is added to an activity.

    Times are from the running event loop.
    """

    def __init__(
        self, note: Callable[[str, float, float], None] = lambda name, begin_s, end_s: None
    ) -> None:
        """`note` is called with each lap: its name, its start and its end."""
        self._note = note
        self.times: dict[str, float] = dict.fromkeys(LAPS, 0.0)
        """Seconds by `LAPS`; their sum is the time from creation to the last lap."""
        self._last_s = asyncio.get_running_loop().time()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now_s = asyncio.get_running_loop().time()
        self.times[name] += now_s - self._last_s
        self._note(_SPANS[name], self._last_s, now_s)
        self._last_s = now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of one step."""

    batch: SampledBatch
    credit: Credit
    plan: StepPlan
    times: Mapping[str, float]
    """Seconds by the names of `LAPS`."""


def step_row(
    result: StepResult,
    machine: Machine,
    *,
    version: WeightVersion,
    max_async_rollout: int,
    held_out: Set[int] = frozenset(),
) -> dict[str, float]:
    """Return the metrics of one step; `version` is that of the weights it trained.

    `held_out`: `question_of` of the examples that evals play.
    """
    batch, credit, times = result.batch, result.credit, result.times
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    num_sampled = sum(r.num_completion_tokens for g in batch.all_groups for r in g.rollouts)
    return {
        **reward_metrics(batch.groups),
        **batch_metrics(batch),
        **rollout_metrics(rollouts),
        **answer_metrics(batch.groups, held_out),
        **credit.metrics,
        **sample_metrics(credit.samples, version, max_async_rollout=max_async_rollout),
        **throughput_metrics(result.plan, times["train"], machine),
        "time/step_s": sum(times.values()),
        **{f"time/{name}_s": seconds for name, seconds in times.items()},
        **({} if batch.duration_s is None else {"time/batch_s": batch.duration_s}),
        **({"tokens/rollout_per_s": num_sampled / batch.duration_s} if batch.duration_s else {}),
    }


def answer_metrics(groups: Sequence[Group], held_out: Set[int] = frozenset()) -> dict[str, float]:
    """Return metrics of the scored rollouts of a step; what they cannot tell is absent.

    `held_out`: `question_of` of the examples that evals play.
    """
    scored = [[r for r in one.rollouts if r.reward is not None and r.turns] for one in groups]
    scored = [rollouts for rollouts in scored if rollouts]
    everything = [rollout for rollouts in scored for rollout in rollouts]
    if not everything:
        return {}
    examples = {_example(rollouts[0]) for rollouts in scored}
    said = Counter(hash(_said(rollout)) for rollout in everything)
    asked = [
        question_of(one.messages, len(one.turns), one.golden_answers)
        for one in (rollouts[0] for rollouts in scored)
    ]
    loops = [ends_in_loop(one.turns[-1].completion.completion_ids) for one in everything]
    return {
        "groups/repeated": float(len(scored) - len(examples)),
        **({"groups/held_out": float(sum(one in held_out for one in asked))} if held_out else {}),
        "answers/most_common": max(said.values()) / len(everything),
        "answers/looping": float(np.mean(loops)),
        "time/score_s": float(np.mean([rollout.score_s for rollout in everything])),
        **_pair_metrics([_pairs(rollouts) for rollouts in scored]),
    }


def _said(rollout: Rollout) -> tuple[bytes, ...]:
    """Return the sampled tokens of each turn."""
    return tuple(turn.completion.completion_ids.tobytes() for turn in rollout.turns)


def _example(rollout: Rollout) -> tuple[object, ...]:
    """Return an identity of a rollout's example: its prompt and its right answer.

    If no right answer is known, it is the example's id: some environments always ask the same text
    and keep the subject to themselves.
    """
    if not rollout.golden_answers:
        return rollout.environment, rollout.example_id
    asked = rollout.turns[0].completion.prompt_ids.tobytes()
    return rollout.environment, asked, *sorted(rollout.golden_answers.items())


def ends_in_loop(ids: "array[int]") -> bool:
    """Return whether the last tokens repeat the same few again and again."""
    for period in range(1, LONGEST_PERIOD + 1):
        num_tokens = max(SHORTEST_LOOP, FEWEST_REPEATS * period)
        end = ids[-num_tokens:]
        if len(end) == num_tokens and end[period:] == end[:-period]:
            return True
    return False


def _pairs(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """Return [3, 2] sums over pairs of the rollouts, and the number of pairs in each.

    The sums are: 1 where the longer rollout got more and -1 where it got less, over pairs that both
    ended by themselves and have different rewards; the squared difference of rewards, over all
    pairs; and the same over pairs with equal tokens, prompts included.
    """
    rewards_G = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    # One that was cut has the length that the settings gave it.
    ended_G = np.array([not rollout.is_truncated for rollout in rollouts])
    lengths_G = np.array([rollout.num_completion_tokens for rollout in rollouts])
    # The last prompt need not hold all that was said: not what another agent wrote.
    prompts = [rollout.turns[-1].completion.prompt_ids.tobytes() for rollout in rollouts]
    seen_G = np.array([hash((p, _said(r))) for p, r in zip(prompts, rollouts, strict=True)])
    pair_GG = np.triu(np.ones((len(rollouts), len(rollouts)), dtype=bool), 1)
    gain_GG = rewards_G[:, None] - rewards_G
    gain_GG[np.abs(gain_GG) <= rounding(np.abs(rewards_G).max())] = 0.0
    order_GG = np.sign(gain_GG) * np.sign(lengths_G[:, None] - lengths_G)
    ordered_GG = pair_GG & ended_G[:, None] & ended_G & (gain_GG != 0.0)
    equal_GG = pair_GG & (seen_G[:, None] == seen_G)
    chosen = ((order_GG, ordered_GG), (gain_GG**2, pair_GG), (gain_GG**2, equal_GG))
    return np.array([(values[which].sum(), which.sum()) for values, which in chosen])


def _pair_metrics(pairs: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    totals, counts = np.sum(pairs, axis=0).T
    is_known = counts >= FEWEST_PAIRS
    order, every, equal = totals / np.maximum(counts, 1.0)
    return {
        **({"reward/length_order": float(order)} if is_known[0] else {}),
        **({"reward/noise": float(equal / every)} if is_known[2] and every > 0 else {}),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return reward metrics of all scored rollouts: overall, per environment and per component."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    components: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group.rollouts:
            if rollout.reward is None:
                continue
            rewards[group.environment].append(rollout.reward)
            for name, value in {**rollout.rewards, **rollout.metrics}.items():
                components[f"reward/{group.environment}/{name}"].append(value)
    everything = [reward for values in rewards.values() for reward in values]
    if not everything:
        return {}
    return {
        "reward/mean": float(np.mean(everything)),
        "reward/std": float(np.std(everything)),
        "reward/min": min(everything),
        "reward/max": max(everything),
        **{name: float(np.mean(values)) for name, values in components.items()},
        # Last, because a metric of an episode may have the name `mean`.
        **{f"reward/{name}/mean": float(np.mean(values)) for name, values in rewards.items()},
    }


def batch_metrics(batch: SampledBatch) -> dict[str, float]:
    """Return metrics of filling a batch: rejected groups, all rewards, failures and queues."""
    by_environment: defaultdict[str, list[float]] = defaultdict(list)
    for group in batch.all_groups:
        found = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        by_environment[group.environment] += found
    every = [reward for rewards in by_environment.values() for reward in rewards]
    reasons = Counter(group.rollouts[0].status_reason for group in batch.rejected)
    num_failed = sum(batch.failed_attempts.values())
    return {
        **({"task_reward/mean": float(np.mean(every))} if every else {}),
        **({"task_reward/std": float(np.std(every))} if every else {}),
        **{
            f"task_reward/{name}/mean": float(np.mean(rewards))
            for name, rewards in by_environment.items()
            if rewards
        },
        "groups/rejected": float(len(batch.rejected)),
        "groups/acceptance": len(batch.groups) / max(1, len(batch.all_groups)),
        **{f"groups/rejected/{reason}": float(count) for reason, count in reasons.items()},
        "rollouts/failed_attempts": float(num_failed),
        "rollouts/off_policy": float(sum(r.status_reason == OFF_POLICY for r in batch.replaced)),
        **({} if batch.length_bias is None else {"length_bias": batch.length_bias}),
        **{f"failures/{edge}": float(batch.failed_attempts.get(edge, 0)) for edge in Boundary},
        **{f"queue/{name}": float(size) for name, size in batch.queues.items()},
        **{f"workers/{name}": value for name, value in batch.workers.items()},
    }


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of lengths, endings and failures of a step's rollouts."""
    played = [rollout for rollout in rollouts if rollout.turns]
    failed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    endings = Counter(rollout.stop_reason for rollout in rollouts)
    truncated = [rollout for rollout in rollouts if rollout.is_truncated]
    endless = [r for r in played if r.turns[-1].completion.finish_reason == "length"]
    return {
        "rollouts/total": float(len(rollouts)),
        "rollouts/failed": float(len(failed)),
        "rollouts/timed_out": float(endings[StopReason.TIMEOUT]),
        "rollouts/out_of_context": float(endings[StopReason.CONTEXT_LENGTH]),
        "requests/sent_again": float(
            sum(turn.completion.num_retries for rollout in rollouts for turn in rollout.turns)
        ),
        "truncated/fraction": len(truncated) / max(1, len(rollouts)),
        "no_eos_ratio": len(endless) / max(1, len(played)),
        **distribution("completion_len", [rollout.num_completion_tokens for rollout in played]),
    }


def sample_metrics(
    samples: Sequence[TrainingSample], version: WeightVersion, *, max_async_rollout: int
) -> dict[str, float]:
    """Return the lengths of samples in tokens, and the ages of tokens, in versions."""
    if not samples:
        return {}
    return {
        **distribution("seq_len", [len(sample) for sample in samples]),
        **_staleness(samples, version, max_async_rollout),
    }


def _staleness(
    samples: Sequence[TrainingSample], version: WeightVersion, max_async_rollout: int
) -> dict[str, float]:
    """Count the sampled tokens by the version that sampled them."""
    num_by_age = Counter[int]()
    num_undelivered = 0
    for sample in samples:
        # The id of a group begins with the batch that it was drawn for, which was admitted once
        # these weights were live.
        live = int(sample.group_id.partition(".")[0]) - max_async_rollout
        for span in sample.version_spans:
            num_by_age[version - span.version] += span.num_tokens
            num_undelivered += span.num_tokens * (span.version < live)
    total = num_by_age.total()
    ages = sorted(age for age, number in num_by_age.items() if number)
    return {
        "staleness/mean": sum(age * num_by_age[age] for age in ages) / total,
        "staleness/max": float(max(ages)),
        "staleness/undelivered": num_undelivered / total,
        **{f"staleness/share_{age}": num_by_age[age] / total for age in ages},
    }


def distribution(name: str, values: Sequence[int]) -> dict[str, float]:
    """Return mean, median, 95th percentile and maximum of `values`; {} if there are none."""
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/p50": float(np.percentile(values, 50)),
        f"{name}/p95": float(np.percentile(values, 95)),
        f"{name}/max": float(max(values)),
    }
