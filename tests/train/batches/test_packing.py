from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.errors import ConfigError
from telescope_train.batches.binning import (
    deal,
    plan_bins,
    sample_costs,
    spread_over_ranks,
)
from telescope_train.batches.packing import pack, packing_fill
from telescope_train.batches.tight_bins import plan_tight_bins
from telescope_train.batches.weighting import token_weights

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def first_fit_decreasing(lengths, capacity) -> int:
    """Count the bins, one sample at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        for place, room in enumerate(rooms):
            if length <= room:
                rooms[place] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


@settings(max_examples=150)
@given(LENGTHS, st.integers(40, 90))
def test_the_first_plan_is_first_fit_decreasing(lengths, capacity):
    distinct, counts = np.unique(lengths, return_counts=True)
    patterns = plan_bins(distinct.tolist(), counts.tolist(), capacity=capacity)
    num_bins = sum(pattern.num_bins for pattern in patterns)
    assert num_bins == first_fit_decreasing(lengths, capacity)


@pytest.mark.slow
@settings(max_examples=150)
@given(LENGTHS, st.integers(40, 90))
def test_bins_hold_every_sample_once_and_never_more_than_their_room(lengths, capacity):
    lengths_N = np.array(lengths)
    bins = spread_over_ranks(lengths_N, seq_len=capacity, num_ranks=1)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    assert max(lengths_N[members].sum() for members in bins) <= capacity
    assert len(bins) <= first_fit_decreasing(lengths, capacity)


@settings(max_examples=150)
@given(LENGTHS, st.integers(40, 400))
def test_tight_bins_hold_every_sample_once_and_never_more_than_their_room(lengths, capacity):
    distinct, counts = np.unique(lengths, return_counts=True)
    patterns = plan_tight_bins(distinct.tolist(), counts.tolist(), capacity=capacity)
    held = np.zeros(41, int)
    for takes, num_bins in patterns:
        assert num_bins >= 1
        assert sum(length * taken for length, taken in takes) <= capacity
        for length, taken in takes:
            held[length] += taken * num_bins
    np.testing.assert_array_equal(held, np.bincount(lengths, minlength=41))


@settings(max_examples=100)
@given(LENGTHS, st.integers(40, 90), st.integers(1, 5))
def test_spreading_over_ranks_needs_no_more_rounds(lengths, seq_len, num_ranks):
    lengths_N = np.array(lengths)
    bins = spread_over_ranks(lengths_N, seq_len=seq_len, num_ranks=num_ranks)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    assert max(lengths_N[members].sum() for members in bins) <= seq_len
    num_rounds = -(-len(bins) // num_ranks)
    assert num_rounds <= -(-first_fit_decreasing(lengths, seq_len) // num_ranks)


def test_ranks_share_what_would_fit_in_fewer_bins():
    lengths_N = np.full(12, 10)
    bins = spread_over_ranks(lengths_N, seq_len=100, num_ranks=4)
    assert [len(members) for members in bins] == [3, 3, 3, 3]


def test_ranks_share_the_work_even_if_one_sample_fills_a_bin():
    lengths_N = np.array([100] + [10] * 40)
    bins = spread_over_ranks(lengths_N, seq_len=100, num_ranks=8)
    assert sorted(lengths_N[members].sum() for members in bins)[1:-1] == [60] * 6


def test_one_long_sample_costs_more_than_as_many_tokens_in_short_ones():
    one, parts = sample_costs(np.array([4096]), 64), sample_costs(np.full(64, 64), 64)
    assert one.sum() > 4 * parts.sum()
    wide = sample_costs(np.array([4096]), 10**6)
    assert wide.sum() == pytest.approx(4096, rel=1e-3)


def test_bins_of_one_round_cost_about_the_same_and_so_do_ranks():
    lengths_N = np.random.default_rng(0).integers(20, 2000, 400)
    bins = spread_over_ranks(lengths_N, seq_len=4096, num_ranks=4)
    ranks = deal(bins, lengths_N, num_ranks=4, hidden_size=256)
    costs_N = sample_costs(lengths_N, 256)
    costs = np.array([[costs_N[members].sum() for members in rank] for rank in ranks])
    waited = costs.max(axis=0).sum() * 4 - costs.sum()
    assert waited < 0.03 * costs.sum()
    assert np.ptp(costs.sum(axis=1)) < 0.02 * costs.sum(axis=1).mean()


MIXES = {
    "lognormal": lambda rng, n: 600 * np.exp(0.8 * rng.standard_normal(n)),
    "two kinds": lambda rng, n: (
        np.where(rng.random(n) < 0.7, 180, 1800) * np.exp(0.5 * rng.standard_normal(n))
    ),
    "many cut": lambda rng, n: (
        (1200 * np.exp(0.7 * rng.standard_normal(n))).clip(max=2048) + rng.integers(50, 400, n)
    ),
}


MIXED = [pytest.param(name, marks=pytest.mark.slow if name == "many cut" else []) for name in MIXES]


@pytest.mark.parametrize("hidden_size", [256, 1024, 4096])
@pytest.mark.parametrize("mix", MIXED)
def test_a_large_step_is_full_and_even_over_ranks(mix, hidden_size):
    lengths_N = MIXES[mix](np.random.default_rng(0), 8192).astype(int).clip(16, 4096)
    bins = spread_over_ranks(lengths_N, seq_len=4096, num_ranks=16)
    ranks = deal(bins, lengths_N, num_ranks=16, hidden_size=hidden_size)
    costs_N = sample_costs(lengths_N, hidden_size)
    costs = np.array([[costs_N[members].sum() for members in rank] for rank in ranks])
    assert lengths_N.sum() / (costs.size * 4096) >= 0.99
    assert costs.sum(axis=1).max() <= 1.01 * costs.sum(axis=1).mean()
    assert costs.max(axis=0).sum() * 16 <= 1.01 * costs.sum()


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=20),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_packs_hold_every_sample_unchanged(make_sample, shapes, num_ranks, seed):
    require_unchanged(make_sample, shapes, num_ranks, seed)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_packs_of_a_few_samples_hold_each_unchanged(make_sample, num_ranks):
    require_unchanged(make_sample, [(3, 4), (1, 1), (9, 12), (2, 5), (8, 1)], num_ranks, 0)


def require_unchanged(make_sample, shapes, num_ranks, seed) -> None:
    samples = [
        make_sample(prompt, written, rollout=number, version=number, advantage=number / 4)
        for number, (prompt, written) in enumerate(shapes)
    ]
    order = np.random.default_rng(seed).permutation(len(samples))
    shuffled = [samples[i] for i in order]
    weights_N = token_weights(shuffled, "sequence", max_tokens=1)
    ranks = pack(shuffled, weights_N, seq_len=24, num_ranks=num_ranks)
    assert len({len(batches) for batches in ranks}) == 1
    weight_of = {s.rollout_index: w for s, w in zip(shuffled, weights_N, strict=True)}
    found = set()
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.num_tokens <= 24
        for number in range(batch.sequence_ids_T.max() + 1):
            at = np.flatnonzero(batch.sequence_ids_T == number)
            assert (np.diff(at) == 1).all()
            sample = samples[batch.versions_T[at[0]]]
            found.add(sample.rollout_index)
            np.testing.assert_array_equal(batch.token_ids_T[at], sample.token_ids)
            np.testing.assert_array_equal(batch.positions_T[at], np.arange(len(sample)))
            np.testing.assert_array_equal(batch.mask_T[at], sample.mask)
            np.testing.assert_array_equal(
                batch.behavior_logprobs_T[at], np.nan_to_num(sample.behavior_logprobs, nan=0.0)
            )
            assert set(batch.advantages_T[at].tolist()) == {sample.advantage}
            assert set(batch.temperatures_T[at].tolist()) == {sample.temperature}
            expected_T = np.where(sample.mask, weight_of[sample.rollout_index], 0.0)
            np.testing.assert_allclose(batch.weights_T[at], expected_T, rtol=1e-6)
    assert len(found) == len(samples)
    total = sum(float(b.weights_T.sum()) for batches in ranks for b in batches)
    assert total == pytest.approx(1.0, rel=1e-5)


def test_every_token_keeps_its_routes_and_minus_one_where_they_are_unknown(make_sample):
    lengths = [5, 3, 4]
    samples = [make_sample(1, length - 1, version=at) for at, length in enumerate(lengths)]
    for at in (0, 2):
        routes_TLK = np.arange(100 * at, 100 * at + lengths[at] * 6, dtype=np.int16)
        samples[at] = replace(samples[at], routes=routes_TLK.reshape(-1, 3, 2))
    [[batch]] = pack(samples, np.ones(3), seq_len=12, num_ranks=1)
    for at, sample in enumerate(samples):
        expected_TLK = -1 if sample.routes is None else sample.routes
        found_TLK = batch.routes_TLK[batch.versions_T == at]
        assert found_TLK.shape == (lengths[at], 3, 2)
        assert (found_TLK == expected_TLK).all()


def test_a_batch_of_samples_without_routes_has_none(make_sample):
    [[batch]] = pack([make_sample()], np.ones(1), seq_len=8, num_ranks=1)
    assert batch.routes_TLK is None


def test_a_rank_without_work_gets_padding_of_weight_zero(make_sample):
    ranks = pack([make_sample()], np.ones(1), seq_len=16, num_ranks=2)
    padding = ranks[1][0]
    assert (padding.sequence_ids_T == -1).all()
    assert not padding.mask_T.any()
    assert not padding.weights_T.any()
    assert padding.num_tokens == padding.num_trained_tokens == 0
    assert packing_fill([*ranks[0], padding], 16) == 5 / 16


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_sample_that_is_too_long_is_named(make_sample, place):
    samples = [make_sample(2, 3), make_sample(4, 6)]
    samples.insert(place, make_sample(5, 6, rollout=4, group="g9"))
    with pytest.raises(ConfigError, match=r"rollout 4 of group 'g9'.*11 tokens.*seq_len is 10"):
        pack(samples, np.ones(3), seq_len=10, num_ranks=1)
    assert len(pack(samples, np.ones(3), seq_len=11, num_ranks=1)[0]) == 3


def test_no_samples_give_no_batches():
    assert pack([], np.zeros(0), seq_len=8, num_ranks=3) == [[], [], []]
    assert packing_fill([], 8) == 0.0


@pytest.mark.parametrize("mix", MIXED)
def test_a_realistic_step_fills_its_batches(mix):
    lengths_N = MIXES[mix](np.random.default_rng(0), 2048).astype(int).clip(16, 4096)
    bins = spread_over_ranks(lengths_N, seq_len=4096, num_ranks=1)
    assert len(bins) <= -(-lengths_N.sum() // 4096) + 1


def test_samples_must_be_whole(make_sample):
    with pytest.raises(ValueError, match="lengths"):
        type(make_sample())(
            **{name: getattr(make_sample(), name) for name in make_sample().__slots__}
            | {"mask": np.ones(2, bool)}
        )
    with pytest.raises(ValueError, match="expected a prompt"):
        make_sample(0, 3)
    with pytest.raises(ValueError, match="expected a prompt"):
        make_sample(3, 0)
