"""The numbers of a step about its rollouts, each against a count by hand."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.types import (
    Completion,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    StopReason,
    Turn,
)
from telescope_train.rollouts.failures import Boundary
from telescope_train.rollouts.order import OFF_POLICY
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.step.metrics import (
    StepClock,
    batch_metrics,
    distribution,
    reward_metrics,
    rollout_metrics,
    sample_metrics,
)


def rollout(reward: float | None = 1.0, *turns: tuple[int, bool], **changes) -> Rollout:
    """Return a rollout with these turns: the number of tokens, and whether it was cut."""
    played = [
        Completion(
            message=Message(role="assistant", content=""),
            finish_reason="length" if is_cut else "stop",
            num_completion_tokens=num_tokens,
            num_retries=num_tokens % 2,
        )
        for num_tokens, is_cut in turns
    ]
    made = Rollout(
        environment="toy",
        example_id="e",
        group_id="g",
        index=0,
        turns=tuple(Turn(completion=one, started_s=0.0, ended_s=1.0) for one in played),
        reward=reward,
    )
    return replace(made, **changes)


def group(*rewards: float | None, environment="toy", **changes) -> Group:
    rollouts = tuple(rollout(one, (3, False), **changes) for one in rewards)
    return Group(id="g", environment=environment, example_id="e", rollouts=rollouts)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_a_distribution_is_that_of_the_sorted_values(values):
    def quantile(share: float) -> float:
        """Interpolated between the values around it, of which the first has 0 and the last 1."""
        place = share * (len(values) - 1)
        low, high = (sorted(values)[min(int(place) + k, len(values) - 1)] for k in (0, 1))
        return low + (place - int(place)) * (high - low)

    assert distribution("n", values) == {
        "n/mean": pytest.approx(sum(values) / len(values)),
        "n/p50": pytest.approx(quantile(0.5)),
        "n/p95": pytest.approx(quantile(0.95)),
        "n/max": max(values),
    }
    assert distribution("n", []) == {}


def test_rollouts_are_counted_by_their_ends():
    rollouts = [
        rollout(1.0, (5, False)),
        rollout(0.0, (4, True), (3, False)),
        rollout(0.0, (2, False), (9, True), stop_reason=StopReason.CONTEXT_LENGTH),
        rollout(0.5, (1, False), stop_reason=StopReason.TIMEOUT),
        rollout(None, status=RolloutStatus.FAILED),
    ]
    row = rollout_metrics(rollouts)
    lengths = distribution("completion_len", [5, 7, 11, 1])
    assert {name: value for name, value in row.items() if name not in lengths} == {
        "rollouts/total": 5,
        "rollouts/failed": 1,
        "rollouts/timed_out": 1,
        "rollouts/out_of_context": 1,
        "requests/sent_again": 4,
        "truncated/fraction": 2 / 5,
        "no_eos_ratio": 1 / 4,  # of those that were played
    }
    assert {name: row[name] for name in lengths} == lengths
    alone = rollout_metrics([rollout(0.0, (4, True))])
    assert (alone["truncated/fraction"], alone["no_eos_ratio"]) == (1.0, 1.0)
    nothing = rollout_metrics([])
    assert set(nothing.values()) == {0.0}


def test_rewards_are_those_of_scored_rollouts_and_of_each_environment():
    of_parts = group(1.0, 0.0, None, rewards={"format": 0.25}, metrics={"size": 4.0})
    row = reward_metrics([of_parts, group(4.0, environment="other")])
    assert row == {
        "reward/mean": pytest.approx(5 / 3),
        "reward/std": pytest.approx(np.std([1.0, 0.0, 4.0])),
        "reward/min": 0.0,
        "reward/max": 4.0,
        "reward/toy/format": 0.25,
        "reward/toy/size": 4.0,
        "reward/toy/mean": 0.5,
        "reward/other/mean": 4.0,
    }
    assert reward_metrics([group(None)]) == {}


def test_a_batch_tells_of_what_it_was_made_of():
    again = [replace(rollout(), status=RolloutStatus.CANCELLED, status_reason=OFF_POLICY)] * 2
    batch = SampledBatch(
        groups=(group(1.0, 0.0), group(None, environment="broken")),
        rejected=(
            group(4.0, 4.0, status_reason="too easy"),
            *[group(0.0, environment="other", status_reason="too hard")] * 3,
        ),
        replaced=(*again, rollout(None, status=RolloutStatus.FAILED)),
        failed_attempts={Boundary.ENDPOINT: 2, Boundary.REWARD: 1},
        queues={"groups_ready": 7},
        workers={"toy/restarts": 1.0},
        duration_s=1.0,
        length_bias=0.75,
    )
    every = [1.0, 0.0, 4.0, 4.0, 0.0, 0.0, 0.0]
    row = batch_metrics(batch)
    assert row == {
        "task_reward/mean": pytest.approx(np.mean(every)),
        "task_reward/std": pytest.approx(np.std(every)),
        "task_reward/toy/mean": 9 / 4,
        "task_reward/other/mean": 0.0,
        "groups/rejected": 4,
        "groups/acceptance": 2 / 6,
        "groups/rejected/too easy": 1,
        "groups/rejected/too hard": 3,
        "rollouts/failed_attempts": 3,
        "rollouts/off_policy": 2,
        "length_bias": 0.75,
        **{f"failures/{one}": 0.0 for one in Boundary},
        "failures/endpoint": 2,
        "failures/reward": 1,
        "queue/groups_ready": 7,
        "workers/toy/restarts": 1.0,
    }
    one = SampledBatch(groups=(group(1.0),), duration_s=None)
    assert batch_metrics(one)["groups/acceptance"] == 1.0
    empty = batch_metrics(SampledBatch(groups=(), duration_s=None))
    assert set(empty.values()) == {0.0}
    assert not any(name.startswith(("task_reward", "length_bias")) for name in empty)


def test_samples_are_as_long_as_their_prompt_and_all_turns(make_sample):
    samples = [make_sample(2, n, rollout=n, group="0.0") for n in (1, 2, 6)]
    row = sample_metrics(samples, 0, max_async_rollout=0)
    lengths = distribution("seq_len", [3, 4, 8])
    assert {name: row[name] for name in lengths} == lengths


async def test_the_time_of_a_step_is_split_into_laps(monkeypatch):
    times = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: next(times))
    told = []
    clock = StepClock(lambda *lap: told.append(lap))
    for name in ("generate", "wait", "train", "generate"):
        clock.lap(name)
    monkeypatch.undo()
    assert clock.times == {"generate": 9.0, "train": 4.0, "sync": 0.0, "wait": 2.0}
    assert told == [
        ("wait for rollouts", 10.0, 11.0),
        ("credit and packing", 11.0, 13.0),
        ("train", 13.0, 17.0),
        ("wait for rollouts", 17.0, 25.0),
    ]
