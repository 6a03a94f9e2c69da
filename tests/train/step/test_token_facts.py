"""What is recorded of each token is what a plain forward and backward pass finds of it."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope_train.backends.protocol import RankDiedError
from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import pack, padding_batch
from telescope_train.batches.weighting import token_weights
from telescope_train.step.records import TokenRecords, turn_facts
from telescope_train.trainer.ranks import LocalRanks

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import backend_settings, require_facts, samples, slow_facts


def branched() -> list:
    """Samples of which every two are chains of one rollout, with turns that alternate."""
    found = []
    for number, sample in enumerate(samples()):
        turns = tuple(part._replace(turn=2 * part.turn + number % 2) for part in sample.turns)
        index = number // 2 % 2
        found.append(replace(sample, rollout_index=index, attempt=index + 1, turns=turns))
    return found


def plan_of(chosen, *, seq_len=64, num_minibatches=1, num_epochs=1) -> StepPlan:
    """Return a step over `chosen`, dealt to minibatches one by one."""
    parts = [chosen[number::num_minibatches] for number in range(num_minibatches)]
    batches = [
        pack(p, token_weights(p, "token", max_tokens=64), seq_len=seq_len, num_ranks=1)
        for p in parts
    ]
    order = list(range(num_minibatches))[::-1] * num_epochs
    return StepPlan(minibatches=batches, order=order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "seq_len", "seed"),
    [
        ("float64", 40, 0),
        pytest.param("float32", 64, 1, marks=pytest.mark.slow),
        pytest.param("float64", 4096, 2, marks=pytest.mark.slow),
    ],
)
async def test_facts_are_those_of_a_plain_pass_in_any_packing(tiny, start, dtype, seq_len, seed):
    chosen = branched()
    order = np.random.default_rng(seed).permutation(len(chosen))
    plan = plan_of([chosen[number] for number in order], seq_len=seq_len)
    plan = replace(plan, minibatches=[[[padding_batch(), *plan.minibatches[0][0]]]])
    ranks = LocalRanks(start(backend_settings(tiny, dtype=dtype, records=True)))
    await ranks.train_step(plan, 0)
    rows = list(turn_facts(plan, await ranks.take_token_facts(), chosen))
    require_facts(rows, slow_facts(tiny, chosen))
    places = [(row.group_id, row.index, row.turn) for row in rows]
    assert places == sorted(places)
    assert all(row.attempt == row.index + 1 for row in rows)
    num_trained = sum(int(sample.mask.sum()) for sample in chosen)
    assert [row.weight for row in rows] == pytest.approx([1 / num_trained] * len(rows))
    assert await ranks.take_token_facts() == [[]]


@pytest.mark.slow
async def test_epochs_and_minibatches_give_the_facts_of_the_first_pass(tiny, start):
    """The minibatch that comes first is under the weights from before the step in all epochs."""
    plan = plan_of(branched(), num_minibatches=2, num_epochs=3)
    ranks = LocalRanks(start(backend_settings(tiny, dtype="float64", records=True)))
    await ranks.train_step(plan, 0)
    rows = list(turn_facts(plan, await ranks.take_token_facts(), branched()))
    assert len(rows) == 2 * len(branched())
    first = slow_facts(tiny, branched()[1::2])
    of_first = [row for row in rows if (row.group_id, row.index, row.turn) in first]
    require_facts(of_first, first)
    later = slow_facts(tiny, branched()[::2])
    with pytest.raises(AssertionError):
        require_facts([row for row in rows if row not in of_first], later)


@pytest.mark.slow
async def test_gradients_in_parts_give_the_facts_of_their_step_alone(tiny, start):
    plan = plan_of(branched(), seq_len=40)
    (shards,) = plan.minibatches
    assert len(shards[0]) > 2
    ranks = LocalRanks(
        start(backend_settings(tiny, dtype="float64", records=True, learning_rate=1e-12))
    )
    for _ in range(2):  # nobody asks for those of the first step
        for batch in shards[0]:
            await ranks.accumulate_gradient([[batch]], 0)
        await ranks.apply_gradient(0.5)
    rows = list(turn_facts(plan, await ranks.take_token_facts(), branched(), scale=0.5))
    require_facts(rows, slow_facts(tiny, branched()))
    num_trained = sum(int(sample.mask.sum()) for sample in branched())
    assert [row.weight for row in rows] == pytest.approx([0.5 / num_trained] * len(rows))


@pytest.mark.slow
async def test_a_token_that_a_mask_took_out_was_pushed_by_nothing(tiny, start):
    """With icepop, tokens whose ratio is above the cap keep their weight and lose their effect."""
    chosen = samples()
    settings = backend_settings(tiny, dtype="float64", records=True)
    icepop = settings.algorithm.model_copy(update={"tis_mode": "icepop", "tis_cap": 1.3})
    ranks = LocalRanks(start(replace(settings, algorithm=icepop)))
    plan = plan_of(chosen)
    await ranks.train_step(plan, 0)
    expected = slow_facts(tiny, chosen)
    for sample in chosen:
        behavior = sample.behavior_logprobs[sample.mask]
        for turn, own in zip((0, 2), np.split(behavior, [sample.turns[0].num_tokens]), strict=True):
            columns = expected[*sample.rollout_key, turn]
            ratio = np.exp(columns[0] - own)
            columns[2] = np.where(ratio > 1.3, 0.0, ratio * sample.advantage)
    everything = np.concatenate([columns[2] for columns in expected.values()])
    assert 0 < np.count_nonzero(everything) < len(everything)
    rows = list(turn_facts(plan, await ranks.take_token_facts(), chosen))
    require_facts(rows, expected)
    assert all(row.weight > 0 for row in rows)


@pytest.mark.slow
async def test_nothing_is_kept_without_the_setting(tiny, start):
    ranks = LocalRanks(start(backend_settings(tiny)))
    await ranks.train_step(plan_of(branched()), 0)
    assert await ranks.take_token_facts() == [[]]


class SlowFolder:
    """Writes only when it is let to, and fails in the steps that it is told to."""

    def __init__(self, *, fails=()) -> None:
        self.may_write, self.steps, self._fails = threading.Event(), [], fails

    def write_token_facts(self, step, rows) -> None:
        assert self.may_write.wait(300)
        if step in self._fails:
            raise OSError("no room")
        self.steps.append((step, len(list(rows))))


@pytest.mark.slow
async def test_the_next_step_does_not_wait_for_the_file_and_the_end_does(tiny, start):
    ranks = LocalRanks(start(backend_settings(tiny, records=True)))
    plan, folder = plan_of(branched()), SlowFolder()

    async def two_steps_and_a_death():
        async with TokenRecords(ranks, folder, is_on=True) as tokens:
            await ranks.train_step(plan, 0)
            await tokens.record(1, plan, branched(), scale=1.0)
            await ranks.train_step(plan, 1)
            assert folder.steps == []
            folder.may_write.set()
            await tokens.record(2, plan, branched(), scale=1.0)
            raise RankDiedError("a rank died")

    with pytest.raises(RankDiedError):
        await two_steps_and_a_death()
    assert folder.steps == [(1, 2 * len(branched())), (2, 2 * len(branched()))]


@pytest.mark.slow
async def test_a_file_that_cannot_be_written_ends_the_run(tiny, start):
    ranks = LocalRanks(start(backend_settings(tiny, records=True)))
    plan, folder = StepPlan(minibatches=[], order=[]), SlowFolder(fails=(1,))
    folder.may_write.set()
    with pytest.raises(OSError, match="no room"):
        async with TokenRecords(ranks, folder, is_on=True) as tokens:
            await tokens.record(1, plan, [], scale=1.0)
