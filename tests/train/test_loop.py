"""Whole steps of the real loop and a real rank over scripted rollouts."""

import sys
from pathlib import Path

import pytest
import torch

from telescope_core.types import RolloutStatus
from telescope_train.loop import train
from telescope_train.models import make_tiny_model
from telescope_train.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parent))
from toy_run import toy_config, toy_parts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture
def start():
    """Return a function that starts a rank in this process; it is closed at the end."""
    workers = []

    def build(settings) -> TrainerWorker:
        workers.append(TrainerWorker(settings))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


async def run(config, folder, start):
    """Return the parts after all steps, and the rows of metrics."""
    parts = await toy_parts(config, folder, start)

    async def after_step(step, row):
        return None

    await train(parts, after_step=after_step)
    await parts.sampler.close()
    return parts, parts.folder.metrics()


async def test_minibatches_and_epochs_are_optimiser_steps(tiny, start, tmp_path):
    config = toy_config(
        tiny,
        number_of_minibatches=2,
        ppo_epochs=2,
        use_ppo_clip=True,
        rollout={"should_accept_fn": "telescope_train.accept:has_signal"},
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


async def test_metrics_of_several_optimiser_steps_are_over_all_their_tokens(tiny, start, tmp_path):
    """At learning rate 0 the weights stay, so two minibatches see what one batch does."""
    rows = {}
    for number in (1, 2):
        config = toy_config(tiny, steps=1, number_of_minibatches=number)
        trainer = config.trainer.model_copy(update={"learning_rate": 0.0})
        config = config.model_copy(update={"trainer": trainer})
        parts, (rows[number],) = await run(config, tmp_path / str(number), start)
        parts.trainer.worker.close()
    for name in ("entropy", "importance_weight/mean", "importance_weight/max", "tokens/trained"):
        assert rows[2][name] == pytest.approx(rows[1][name], rel=1e-6), name


async def test_filtered_rollouts_are_recorded_with_the_reason(tiny, start, tmp_path):
    config = toy_config(tiny, steps=1, filter_overlong=True)
    parts, (row,) = await run(config, tmp_path / "run", start)
    recorded = parts.folder.rollouts()
    overlong = [one for one in recorded if one.status_reason == "overlong"]
    assert len(overlong) == row["filtered/overlong"] > 0
    assert all(one.is_truncated and one.advantage is not None for one in overlong)
    trained = sum(one.num_completion_tokens for one in recorded if one.status == "kept")
    assert row["tokens/trained"] == trained


async def test_a_step_is_the_same_when_it_is_taken_again(tiny, start, tmp_path):
    weights = []
    for attempt in range(2):
        config = toy_config(tiny, number_of_minibatches=2, ppo_epochs=2)
        parts, _ = await run(config, tmp_path / str(attempt), start)
        weights.append({n: v.clone() for n, v in parts.trainer.worker.export_weights()})
        parts.trainer.worker.close()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
