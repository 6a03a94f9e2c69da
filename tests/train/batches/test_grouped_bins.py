"""Bins of two, three or four samples: nothing lost, nothing too full, hardly a hole."""

from collections import Counter

import numpy as np
import pytest

from telescope_train.batches import binning
from telescope_train.batches.binning import plan_bins, spread_over_ranks
from telescope_train.batches.tight_bins import plan_grouped_bins, plan_tight_bins


def counted(lengths):
    return tuple(column.tolist() for column in np.unique(lengths, return_counts=True))


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_in_a_bin_and_no_bin_is_too_full(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([10, 100, 4096]))
    low, high = np.sort(rng.uniform(0.1, 1.0, 2))
    lengths = rng.uniform(low * capacity, high * capacity, int(rng.integers(1, 300)))
    lengths = lengths.astype(np.int64).clip(1, capacity)
    plan = plan_grouped_bins(*counted(lengths), capacity=capacity)
    if plan is None:
        assert len(lengths) * capacity > 6 * lengths.sum()
        return
    found = Counter()
    for takes, num_bins in plan:
        assert 0 < sum(length * taken for length, taken in takes) <= capacity
        assert [length for length, _ in takes] == sorted({one for one, _ in takes}, reverse=True)
        for length, taken in takes:
            found[length] += taken * num_bins
    assert found == Counter(lengths.tolist())


def test_no_samples_and_short_ones_have_no_such_plan():
    assert plan_grouped_bins([], [], capacity=10) is None
    assert plan_grouped_bins([1, 2], [50, 50], capacity=100) is None


@pytest.mark.parametrize(("low", "high", "saved"), [(0.3, 0.6, 0.01), (0.25, 0.5, 0.04)])
def test_samples_of_middling_lengths_need_fewer_bins_than_with_other_plans(low, high, saved):
    rng = np.random.default_rng(7)
    lengths = rng.uniform(low * 32_768, high * 32_768, 1024).astype(np.int64)
    others = (
        sum(pattern.num_bins for pattern in plan(*counted(lengths), capacity=32_768))
        for plan in (plan_bins, plan_tight_bins)
    )
    assert len(spread_over_ranks(lengths, seq_len=32_768, num_ranks=1)) <= (1 - saved) * min(others)


def test_it_is_not_made_where_it_could_save_no_more_than_one_bin_of_a_few_hundred(monkeypatch):
    """It takes up to a second for thousands of samples."""
    rng = np.random.default_rng(3)
    answers = rng.lognormal(np.log(1200), 0.7, 2048).clip(1, 2048)
    lengths = answers.astype(np.int64) + rng.integers(50, 400, 2048)
    made = []
    monkeypatch.setattr(binning, "plan_grouped_bins", lambda *_, **__: made.append(1))
    bins = spread_over_ranks(lengths, seq_len=4096, num_ranks=1)
    assert not made
    assert len(bins) * 4096 < 1.004 * lengths.sum()
    spread_over_ranks(np.full(100, 1400), seq_len=4096, num_ranks=1)
    assert made, "two to a bin are far from full"
