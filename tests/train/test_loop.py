"""Whole steps of the real loop and a real rank over scripted rollouts."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from telescope_core.base.retries import MAX_FAILED
from telescope_core.errors import EndpointError, TelescopeError
from telescope_core.records import Resume, RunFolder
from telescope_core.scripted import ScriptedClient
from telescope_core.types import RolloutStatus
from telescope_train.loop import train
from telescope_train.step.records import record_unfinished
from telescope_train.summary import make_summary

sys.path.insert(0, str(Path(__file__).parent))
from toy_run import ToyPolicies, toy_config, toy_parts


async def no_step(step, row):
    return None


async def run(config, folder, start):
    """Return the parts after all steps, and the rows of metrics."""
    parts = await toy_parts(config, folder, start)

    await train(parts, after_step=no_step)
    await parts.sampler.close()
    return parts, parts.folder.metrics()


@pytest.mark.slow
async def test_minibatches_and_epochs_are_optimizer_steps(tiny, start, tmp_path):
    config = toy_config(
        tiny,
        number_of_minibatches=2,
        ppo_epochs=2,
        use_ppo_clip=True,
        rollout={"should_accept_fn": "has_signal"},
    )
    parts, rows = await run(config, tmp_path / "run", start)
    assert [row["optimizer/steps"] for row in rows] == [4, 4]
    assert [row["groups/total"] for row in rows] == [4, 4]
    assert [row["groups/discarded"] for row in rows] == [0, 0]
    assert [len(plan.minibatches) for plan in parts.trainer.plans] == [2, 2]
    recorded = parts.folder.rollouts()
    rejected = [row for row in recorded if row.status_reason == "all_equal"]
    assert len(rejected) == 4 * sum(row["groups/rejected"] for row in rows)
    assert {row.status for row in rejected} <= {RolloutStatus.DISCARDED}
    assert len(recorded) - len(rejected) == 2 * 16
    assert rejected
    for row in rows:
        sampled = [one.reward for one in recorded if one.step == row["step"]]
        assert row["task_reward/toy/mean"] == pytest.approx(sum(sampled) / len(sampled))
    summary = make_summary(config, parts.folder)
    assert summary["rewards"] == [row["task_reward/mean"] for row in rows]
    assert summary["rewards"] != [row["reward/mean"] for row in rows]


@pytest.mark.slow
async def test_metrics_of_several_optimizer_steps_are_over_all_their_tokens(tiny, start, tmp_path):
    """At learning rate 0 the weights stay, so two minibatches see what one batch does."""
    rows = {}
    for number in (1, 2):
        config = toy_config(tiny, steps=1, number_of_minibatches=number)
        trainer = config.trainer.model_copy(update={"learning_rate": 0.0})
        config = config.model_copy(update={"trainer": trainer})
        _, (rows[number],) = await run(config, tmp_path / str(number), start)
    for name in ("entropy", "importance_weight/mean", "importance_weight/max", "tokens/trained"):
        assert rows[2][name] == pytest.approx(rows[1][name], rel=1e-6), name


@pytest.mark.slow
async def test_a_gradient_that_an_optimizer_does_not_clear_is_told(tiny, start, tmp_path):
    parts = await toy_parts(toy_config(tiny), tmp_path / "run", start)
    optimizer = parts.trainer.worker.backend._optimizer

    async def after_step(step, row):
        optimizer.zero_grad = lambda: None

    await train(parts, after_step=after_step)
    await parts.sampler.close()
    assert [row["optimizer/kept_gradients"] for row in parts.folder.metrics()] == [0, 1]


@pytest.mark.slow
async def test_filtered_rollouts_are_recorded_with_the_reason(tiny, start, tmp_path):
    config = toy_config(tiny, steps=1, filter_overlong=True)
    parts, (row,) = await run(config, tmp_path / "run", start)
    recorded = parts.folder.rollouts()
    overlong = [one for one in recorded if one.status_reason == "overlong"]
    assert len(overlong) == row["filtered/overlong"] > 0
    assert all(one.is_truncated and one.advantage is not None for one in overlong)
    kept = [one for one in recorded if one.status == "kept"]
    assert row["tokens/trained"] == sum(one.num_completion_tokens for one in kept)
    facts = list(parts.folder.token_facts(1))
    # What was filtered or discarded was not trained on, so there is nothing about its tokens.
    assert [(one.group_id, one.index, len(one.logprobs)) for one in facts] == [
        (one.group_id, one.index, one.num_completion_tokens) for one in kept
    ]
    assert row["entropy"] == pytest.approx(
        np.concatenate([one.entropy for one in facts]).mean(), 1e-3
    )


@pytest.mark.slow
async def test_nothing_about_tokens_is_written_without_the_setting(tiny, start, tmp_path):
    config = toy_config(tiny, steps=1)
    quiet = config.observability.model_copy(update={"record_token_facts": False})
    parts, _ = await run(
        config.model_copy(update={"observability": quiet}), tmp_path / "run", start
    )
    assert not (parts.folder.path / "token_facts").exists()


@pytest.mark.slow
async def test_a_step_that_trains_on_nothing_has_a_file_that_says_so(tiny, start, tmp_path):
    """A folder without the file is of a run that did not record tokens."""

    # Every rollout is cut off by its limit, and those are left out.
    class Endless(ToyPolicies):
        @staticmethod
        def _reply(generator, messages):
            return replace(ToyPolicies()._reply(generator, messages), finish_reason="length")

    config = toy_config(tiny, steps=1, filter_overlong=True)
    parts = await toy_parts(config, tmp_path / "run", start, policies=Endless())
    await train(parts, after_step=no_step)
    await parts.sampler.close()
    (row,) = parts.folder.metrics()
    assert "loss/total" not in row
    assert (parts.folder.path / "token_facts" / "step-000001.parquet").is_file()
    assert list(parts.folder.token_facts(1)) == []


@pytest.mark.slow
async def test_attempts_that_were_replaced_are_recorded_apart(tiny, start, tmp_path):
    class Hiccups(ToyPolicies):
        """Fails the first request of every second rollout."""

        seen: ClassVar[set[str]] = set()

        def policy(self, rollout_id, sampling=None):
            is_first = rollout_id not in self.seen
            self.seen.add(rollout_id)
            if is_first and rollout_id.endswith(("0", "2")):
                return ScriptedClient([EndpointError("busy")]).policy(rollout_id)
            return super().policy(rollout_id, sampling)

    config = toy_config(tiny, steps=2)
    parts = await toy_parts(config, tmp_path / "run", start, policies=Hiccups())

    async def after_step(step, row):
        return None

    await train(parts, after_step=after_step)
    folder, rows = parts.folder, parts.folder.metrics()
    recorded, attempts = folder.rollouts(), folder.attempts()
    assert len(recorded) == sum(row["rollouts/total"] for row in rows) == 2 * 16
    assert sum(folder.count_rollouts().values()) == 2 * 16
    assert sum(row["rollouts/failed"] for row in rows) == 0
    assert len(attempts) == sum(row["rollouts/failed_attempts"] for row in rows) == 2 * 8
    assert {(one.attempt, one.status, one.error) for one in attempts} == {
        (1, RolloutStatus.FAILED, "EndpointError: busy")
    }
    assert {one.step for one in attempts} == {1, 2}
    replaced = {(one.group_id, one.index) for one in attempts}
    assert {(r.group_id, r.index) for r in recorded if r.attempt == 2} == replaced
    # What is repeated after a resume must not be there twice.
    folder.finish()
    resumed = RunFolder.resume(
        folder.path,
        config={},
        resume=Resume(at="now", checkpoint="c", step=1),
    )
    resumed.drop_after(1)
    assert {one.step for one in resumed.attempts()} == {1}


@pytest.mark.slow
async def test_a_batch_in_which_everything_failed_is_in_the_run_folder(tiny, start, tmp_path):
    class Dead(ToyPolicies):
        def policy(self, rollout_id, sampling=None):
            return ScriptedClient([EndpointError("gone")]).policy(rollout_id)

    config = toy_config(tiny, steps=1)
    parts = await toy_parts(config, tmp_path / "run", start, policies=Dead())
    with pytest.raises(TelescopeError, match="the rollouts are in the run folder"):
        await train(parts, after_step=None)
    record_unfinished(parts.folder, await parts.sampler.close())
    attempts = parts.folder.attempts()
    assert len(attempts) == 16 * MAX_FAILED
    assert {one.attempt for one in attempts} == {1, 2, 3}


@pytest.mark.slow
async def test_a_step_is_the_same_when_it_is_taken_again(tiny, start, tmp_path):
    weights = []
    for attempt in range(2):
        config = toy_config(tiny, number_of_minibatches=2, ppo_epochs=2, use_ppo_clip=True)
        parts, _ = await run(config, tmp_path / str(attempt), start)
        weights.append({n: v.clone() for n, v in parts.trainer.worker.export_weights()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
async def test_one_minibatch_with_recomputed_logprobs_has_weight_exactly_1(tiny, start, tmp_path):
    clipped = {"use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch"}
    _, rows = await run(toy_config(tiny, **clipped), tmp_path / "run", start)
    ratios = [(row["importance_weight/min"], row["importance_weight/max"]) for row in rows]
    clipped = [(row["clip_fraction/low"], row["clip_fraction/high"]) for row in rows]
    assert ratios == [(1.0, 1.0)] * 2
    assert clipped == [(0.0, 0.0)] * 2
    assert 1.0 not in [row["behave_imp_weight/mean"] for row in rows], "servers round otherwise"


@pytest.mark.slow
async def test_a_second_epoch_sees_weights_that_moved(tiny, start, tmp_path):
    clipped = {"use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch", "ppo_epochs": 2}
    _, (row,) = await run(toy_config(tiny, steps=1, **clipped), tmp_path / "run", start)
    largest = row["importance_weight/max"]
    assert largest > 1.0


@pytest.mark.slow
async def test_the_reference_is_filled_in_and_follows_when_asked(tiny, start, tmp_path):
    settings = {"kl_penalty_tau": 0.1, "reference_update_every": 2}
    parts, rows = await run(toy_config(tiny, steps=4, **settings), tmp_path / "run", start)
    assert parts.trainer.reference_updates == [2, 4]
    distances = [row["kl/reference"] for row in rows]
    assert distances[0] == distances[2] == 0, "equal weights: at the start, and after an update"
    assert distances[1] > 0
    assert distances[3] > 0
    assert rows[1]["loss/kl"] > 0


@pytest.mark.slow
async def test_kl_in_the_reward_begins_at_exactly_0_and_stays_out_of_the_loss(
    tiny, start, tmp_path
):
    settings = {"kl_penalty_tau": 0.1, "kl_estimator": "k1", "kl_in_reward": True}
    _, rows = await run(toy_config(tiny, steps=2, **settings), tmp_path / "run", start)
    assert all("loss/kl" not in row for row in rows)
    for name in ("reward_shaping/kl", "kl/reference"):
        assert rows[0][name] == 0, "the policy is its reference, whatever the engine rounds"
        assert rows[1][name] != 0
