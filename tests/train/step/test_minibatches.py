"""Groups dealt into optimizer steps: whole, equal, weighted each by itself."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.types import Sampling
from telescope_train.algorithms import load_algorithm
from telescope_train.batches.packing import Packing
from telescope_train.config.schema import TrainConfig
from telescope_train.step.credit import CreditRules
from telescope_train.step.minibatches import deal_groups, plan_step

PACKING = Packing(seq_len=64, num_ranks=2, hidden_size=64, max_tokens=8)


def rules(**algorithm) -> CreditRules:
    config = TrainConfig.model_validate(
        {
            "run": {"name": "r", "number_of_steps": 1, "seed": 3},
            "model": {"model": "m"},
            "environments": [{"name": "toy"}],
            "algorithm": algorithm,
        }
    )
    sampling = {"toy": Sampling(max_tokens=8)}
    return CreditRules(
        algorithm=load_algorithm("grpo"), config=config, sampling=sampling, vocab_size=11
    )


def samples_of(make_sample, sizes):
    return [
        make_sample(2, 1 + (index + number) % 5, rollout=index, group=f"g{number}")
        for number, size in enumerate(sizes)
        for index in range(size)
    ]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=9), st.integers(1, 5), st.integers(0, 50))
def test_groups_are_whole_dealt_once_and_evenly(make_sample, sizes, number, seed):
    samples = samples_of(make_sample, sizes)
    parts = list(deal_groups(samples, number, np.random.default_rng(seed)))
    assert len(parts) == min(number, len(sizes))
    owners = [{sample.group_id for sample in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners)) == len(sizes)
    assert max(map(len, owners), default=0) - min(map(len, owners), default=0) <= 1
    dealt = [id(sample) for part in parts for sample in part]
    assert Counter(dealt) == Counter(map(id, samples))


def test_one_minibatch_keeps_the_order_of_the_samples(make_sample):
    samples = samples_of(make_sample, [2, 3, 1])
    assert list(deal_groups(samples, 1, np.random.default_rng(0))) == [samples]


@pytest.mark.parametrize("number", [2, 3])
def test_groups_meet_others_in_each_step(make_sample, number):
    samples = samples_of(make_sample, [2] * 6)

    def first_part(version: int) -> frozenset[str]:
        parts = deal_groups(samples, number, np.random.default_rng([3, version]))
        return frozenset(sample.group_id for sample in next(parts))

    assert len({first_part(version) for version in range(20)}) > 3


@pytest.mark.parametrize("number", [1, 2, 4])
def test_every_optimizer_step_has_a_denominator_of_its_own(make_sample, number):
    samples = samples_of(make_sample, [3] * 8)
    plan = plan_step(samples, rules(number_of_minibatches=number), PACKING, version=0)
    assert len(plan.minibatches) == number
    for shards in plan.minibatches:
        assert len({len(shard) for shard in shards}) == 1
        total = sum(float(b.weights_T.sum()) for shard in shards for b in shard)
        assert total == pytest.approx(1.0, abs=1e-6), "token weights add up to 1 over all ranks"
    trained = sum(batch.num_trained_tokens for batch in plan.packed)
    assert trained == sum(int(sample.mask.sum()) for sample in samples)


def test_epochs_go_through_all_minibatches_in_a_seeded_order(make_sample):
    samples = samples_of(make_sample, [2] * 8)
    settings_ = rules(number_of_minibatches=4, ppo_epochs=3)
    plans = [plan_step(samples, settings_, PACKING, version=version) for version in (5, 5, 6)]
    orders = [list(plan.order) for plan in plans]
    assert [sorted(orders[0][start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    ids = [[batch.token_ids_T.tolist() for batch in plan.packed] for plan in plans]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


def test_no_samples_make_no_optimizer_step():
    plan = plan_step([], rules(number_of_minibatches=2), PACKING, version=0)
    assert (list(plan.minibatches), list(plan.order), plan.packed) == ([], [], [])


def test_fewer_groups_than_minibatches_leave_none_empty(make_sample):
    settings_ = rules(number_of_minibatches=4)
    plan = plan_step(samples_of(make_sample, [2, 2]), settings_, PACKING, version=0)
    assert sorted(plan.order) == [0, 1]
