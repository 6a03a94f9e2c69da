"""Whole runs in virtual time: the real loop, sampler, pool and publisher; equal every time."""

import pytest

from telescope_train.config.schema import TrainConfig
from telescope_train.simulation.engine import EngineSpeed
from telescope_train.simulation.environments import WORKLOADS, Workload, lognormal
from telescope_train.simulation.run import Scenario, simulate
from telescope_train.simulation.trainer import TrainerSpeed


def scenario(workload="reasoning", *, steps=8, ahead=1, seed=0, groups=8, **settings) -> Scenario:
    streams = settings.pop("stream_gradients", "auto")
    config = TrainConfig.model_validate(
        {
            "run": {"name": "simulated", "number_of_steps": steps, "seed": seed},
            "model": {"model": "none"},
            "environments": [{"name": "simulated"}],
            "rollout": {
                "group_size": 4,
                "prompts_batch_size_for_trainer": groups,
                "max_tokens": 32_768,
                "rollout_timeout_s": 36_000.0,
            },
            "scheduling": {"max_async_rollout": ahead, "stream_gradients": streams},
            "trainer": {"seq_len": 65_536},
        }
    )
    return Scenario(
        config=config,
        workload=WORKLOADS[workload] if isinstance(workload, str) else workload,
        num_servers=settings.pop("num_servers", 2),
        num_ranks=settings.pop("num_ranks", 2),
        **settings,
    )


@pytest.mark.slow
def test_equal_seeds_give_equal_histories_and_others_do_not():
    first, again = simulate(scenario()), simulate(scenario())
    assert first.history == again.history
    assert first.rows == again.rows
    assert first.duration_s == again.duration_s
    assert simulate(scenario(seed=1)).history != first.history


@pytest.mark.parametrize(
    "workload",
    [pytest.param(one, marks=pytest.mark.slow if one == "agents" else []) for one in WORKLOADS],
)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_schedule_prefers_short_answers_or_is_staler_than_its_bound(workload, ahead):
    found = simulate(scenario(workload, ahead=ahead))
    assert len(found.rows) == 8
    assert found.length_bias == pytest.approx(1.0, abs=1e-9)
    assert max(row["staleness/max"] for row in found.rows) <= ahead
    assert all(row["rollouts/total"] == 32 for row in found.rows)
    assert all(row["rollouts/failed"] == 0 for row in found.rows)


@pytest.mark.slow
def test_sampling_ahead_and_streaming_save_time_and_change_no_batch():
    by_schedule = {
        (ahead, streams): simulate(scenario(ahead=ahead, groups=32, stream_gradients=streams))
        for ahead in (0, 1, 2)
        for streams in (False, True)
    }
    steps = {key: found.step_s for key, found in by_schedule.items()}
    for streams in (False, True):
        assert steps[0, streams] > steps[1, streams] > steps[2, streams]
    for ahead in (0, 1, 2):
        assert steps[ahead, True] < steps[ahead, False]
    rewards = {tuple(row["reward/mean"] for row in one.rows) for one in by_schedule.values()}
    assert len(rewards) == 1, "every schedule trains on the same batches"


def test_failed_attempts_are_played_again_and_none_becomes_a_reward():
    flaky = Workload(lengths=lognormal(500, 0.8), failure_rate=0.2)
    found = simulate(scenario(flaky, steps=10))
    failed = sum(row["rollouts/failed_attempts"] for row in found.rows)
    assert failed > 20
    assert sum(row["failures/environment"] for row in found.rows) == failed
    kept = sum(row["rollouts/total"] - row["rollouts/failed"] for row in found.rows)
    assert kept == pytest.approx(320, abs=12)


def test_a_small_cache_preempts_and_every_token_is_still_written():
    tight = EngineSpeed(cache_tokens=70_000)
    found = simulate(scenario(steps=3, engine=tight, num_servers=1))
    roomy = simulate(scenario(steps=3, num_servers=1))
    assert found.num_preemptions > 0
    assert found.mean_trained == roomy.mean_trained
    assert found.duration_s > roomy.duration_s


@pytest.mark.slow
def test_more_of_the_machine_that_limits_is_faster():
    slow = simulate(scenario(steps=5, trainer=TrainerSpeed(tokens_per_s=100.0)))
    fast = simulate(scenario(steps=5, trainer=TrainerSpeed(tokens_per_s=100.0), num_ranks=8))
    assert slow.trainer_busy > 0.9
    # Less than four times as fast: the longest rollout of a batch is on one rank.
    assert fast.step_s < 0.6 * slow.step_s
