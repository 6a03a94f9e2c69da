"""The intervals around curves of rewards: within the range, and as wide as they have to be."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_ui.pages.rewards import band

VALUES = st.lists(st.integers(0, 100).map(lambda one: one / 100), min_size=2, max_size=40)


def moments(values):
    mean = math.fsum(values) / len(values)
    return len(values), mean, math.fsum((one - mean) ** 2 for one in values) / len(values)


@given(VALUES)
def test_a_band_holds_the_mean_and_stays_within_the_range(values):
    low, high = band(*moments(values), (0.0, 1.0))
    num, mean, _ = moments(values)
    assert 0 <= low <= mean <= high <= 1
    assert high - low > 1e-6
    assert band(1, mean, 0.0, (0.0, 1.0)) == (None, None)
    assert num >= 2


@given(VALUES, st.sampled_from([(-1.0, 2.0), (3.0, 0.01), (0.0, 200.0)]))
def test_a_band_moves_and_grows_with_the_range(values, line):
    first, span = line
    low, high = band(*moments(values), (0.0, 1.0))
    moved = band(*moments([first + span * one for one in values]), (first, first + span))
    assert moved.low == pytest.approx(first + span * low, abs=1e-6 * span)
    assert moved.high == pytest.approx(first + span * high, abs=1e-6 * span)


@given(VALUES)
def test_losses_seen_as_gains_have_the_band_upside_down(values):
    low, high = band(*moments(values), (0.0, 1.0))
    other = band(*moments([1 - one for one in values]), (0.0, 1.0))
    assert (other.low, other.high) == (pytest.approx(1 - high), pytest.approx(1 - low))


@pytest.mark.parametrize(("chance", "num"), [(0.5, 8), (0.5, 64), (0.2, 16), (0.1, 64), (0.9, 32)])
def test_bands_cover_the_truth_about_as_often_as_they_say(chance, num):
    drawn = random.Random(0)
    times, found = 1000, 0
    for _ in range(times):
        # Groups of 8 rollouts whose chances of success differ.
        chances = [drawn.betavariate(2 * chance, 2 * (1 - chance)) for _ in range(num)]
        groups = [sum(drawn.random() < one for _ in range(8)) / 8 for one in chances]
        low, high = band(*moments(groups), (0.0, 1.0))
        found += low <= chance <= high
    assert 0.92 <= found / times <= 0.985


def test_without_a_range_the_band_is_that_of_students_t():
    low, high = band(2, 0.25, 0.0625, None)
    assert (low, high) == (pytest.approx(0.25 - 3.1766, abs=1e-3), pytest.approx(3.4266, abs=1e-3))


def test_a_band_of_huge_rewards_stays_within_the_range():
    low, high = band(4, 5e199, math.inf, (0.0, 1e200))
    assert 0.0 <= low < 5e199 < high <= 1e200
