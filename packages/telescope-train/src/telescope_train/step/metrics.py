"""The row of metrics of one step, without the trainer's; docs/reference/metrics.md lists all."""

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from telescope_core.base.types import WeightVersion
from telescope_train.batches.batch import StepPlan
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.step.answer_metrics import answer_metrics
from telescope_train.step.credit import Credit
from telescope_train.step.rollout_metrics import (
    batch_metrics,
    reward_metrics,
    rollout_metrics,
    sample_metrics,
)
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
        "tokens/rollout_per_s": num_sampled / batch.duration_s if batch.duration_s > 0 else 0.0,
        "time/step_s": sum(times.values()),
        **{f"time/{name}_s": seconds for name, seconds in times.items()},
        "time/batch_s": batch.duration_s,
    }
