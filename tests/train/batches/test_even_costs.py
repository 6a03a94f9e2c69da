"""Batches that cost the same in each round: nothing lost, nothing too long, never dearer."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from telescope_train.batches.binning import deal, sample_costs, spread_over_ranks
from telescope_train.batches.even_costs import draft_by_costs, spread_by_costs, spread_evenly
from telescope_train.batches.least_time import least_time, waiting_time

HIDDEN = 256


def lengths_of(seed: int, num_samples: int, most: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    kind = seed % 4
    if kind == 0:
        found = 0.12 * most * np.exp(0.8 * rng.standard_normal(num_samples))
    elif kind == 1:
        found = np.where(rng.random(num_samples) < 0.7, 0.05 * most, 0.5 * most)
        found = found * np.exp(0.5 * rng.standard_normal(num_samples))
    elif kind == 2:
        found = rng.uniform(0.3 * most, 0.6 * most, num_samples)
    else:
        found = np.where(rng.random(num_samples) < 0.2, most, rng.uniform(1, 20, num_samples))
    return found.astype(np.int64).clip(1, most)


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_is_whole_fits_and_is_never_dearer_than_the_one_before(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    seq_len, num_ranks = int(rng.choice([64, 512, 4096])), int(rng.choice([1, 2, 3, 8]))
    lengths = lengths_of(seed, int(rng.integers(1, 120)), seq_len)
    options = {"num_ranks": num_ranks, "hidden_size": HIDDEN}
    plan = spread_evenly(lengths, seq_len=seq_len, **options)
    members = np.concatenate([one for rank in plan for one in rank])
    assert sorted(members.tolist()) == list(range(len(lengths))), "every sample once"
    assert max(lengths[one].sum() for rank in plan for one in rank) <= seq_len
    before = deal(
        spread_over_ranks(lengths, seq_len=seq_len, num_ranks=num_ranks), lengths, **options
    )
    assert {len(rank) for rank in plan} == {len(before[0])}, "as many rounds, the same for all"
    costs = sample_costs(lengths, HIDDEN)
    assert waiting_time(plan, costs) <= waiting_time(before, costs) * (1 + 1e-12)


def test_equal_samples_give_equal_plans() -> None:
    lengths = lengths_of(0, 200, 4096)
    first, again = (
        spread_evenly(lengths, seq_len=4096, num_ranks=4, hidden_size=HIDDEN) for _ in range(2)
    )
    for one, other in zip(first, again, strict=True):
        assert [bin.tolist() for bin in one] == [bin.tolist() for bin in other]


def test_the_worst_waits_become_small() -> None:
    """Bins that are full of short samples are far cheaper than those with long ones."""
    lengths = np.array([700] * 3 + [50] * 100)
    costs = sample_costs(lengths, 16)
    options = {"num_ranks": 4, "hidden_size": 16}
    before = deal(spread_over_ranks(lengths, seq_len=3000, num_ranks=4), lengths, **options)
    after = spread_evenly(lengths, seq_len=3000, **options)
    ideal = costs.sum() / 4
    assert waiting_time(before, costs) > 2 * ideal
    assert waiting_time(after, costs) < 1.05 * ideal


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_fewer_samples_than_ranks_leave_some_of_them_without(num_ranks: int) -> None:
    plan = spread_evenly(np.array([7, 5]), seq_len=10, num_ranks=num_ranks, hidden_size=HIDDEN)
    assert sum(one.size for rank in plan for one in rank) == 2
    assert len({len(rank) for rank in plan}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_samples_changes_nothing_that_counts(seed: int) -> None:
    rng = np.random.default_rng(2000 + seed)
    seq_len, num_ranks = int(rng.choice([64, 512, 4096])), int(rng.choice([1, 3, 8]))
    lengths = lengths_of(seed, int(rng.integers(1, 120)), seq_len)
    # Costs that do not follow from lengths, as those of bundles that share prefixes.
    costs = sample_costs(lengths, HIDDEN) * rng.choice([1.0, 1.5], len(lengths))
    limits = {"seq_len": seq_len, "num_ranks": num_ranks}

    def contents(order: NDArray[np.int64]) -> list[list[list[tuple[int, float]]]]:
        ranks = spread_by_costs(lengths[order], costs[order], **limits)
        kinds = list(zip(lengths[order].tolist(), costs[order].tolist(), strict=True))
        return [[sorted(kinds[i] for i in one.tolist()) for one in rank] for rank in ranks]

    as_they_come = contents(np.arange(len(lengths)))
    for _ in range(3):
        assert contents(rng.permutation(len(lengths))) == as_they_come


def every_plan(lengths: list[int], seq_len: int) -> Iterator[list[list[int]]]:
    """Yield the samples in bins of at most `seq_len`, in every way."""
    if not lengths:
        yield []
        return
    number = len(lengths) - 1
    for plan in every_plan(lengths[:-1], seq_len):
        yield [*plan, [number]]
        for place, members in enumerate(plan):
            if sum(lengths[i] for i in members) + lengths[number] <= seq_len:
                yield [*plan[:place], [*members, number], *plan[place + 1 :]]


@pytest.mark.parametrize("seed", range(30))
def test_no_plan_at_all_is_below_the_least_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 20, int(rng.integers(1, 8)))
    costs = sample_costs(lengths, 1) * rng.choice([1.0, 2.0], len(lengths))
    num_ranks = int(rng.choice([1, 2, 3]))
    least = least_time(lengths, costs, seq_len=20, num_ranks=num_ranks)
    best = min(
        # Bins in order of cost give the cheapest rounds.
        sum(sorted((float(costs[one].sum()) for one in plan), reverse=True)[::num_ranks])
        for plan in every_plan(lengths.tolist(), 20)
    )
    assert least <= best * (1 + 1e-12)
    found = spread_by_costs(lengths, costs, seq_len=20, num_ranks=num_ranks)
    assert least <= waiting_time(found, costs) * (1 + 1e-12)


@pytest.mark.slow
def test_ranks_wait_hardly_more_than_they_must_where_samples_are_few_and_long() -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        lengths = (0.12 * 32_768 * np.exp(0.8 * rng.standard_normal(256))).astype(np.int64)
        lengths = lengths.clip(16, 32_768)
        costs = sample_costs(lengths, 2048)
        limits = {"seq_len": 32_768, "num_ranks": 8}
        ranks = spread_by_costs(lengths, costs, **limits)
        assert waiting_time(ranks, costs) < 1.02 * least_time(lengths, costs, **limits)
        draft = draft_by_costs(lengths, costs, **limits)
        assert waiting_time(ranks, costs) < 0.99 * waiting_time(draft, costs)
