"""Eval statistics against enumeration, tables and simulation."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.evals.distributions import (
    beta_quantile,
    incomplete_beta,
    t_cdf,
    t_quantile,
)
from telescope_core.evals.stats import (
    majority_at_k,
    mean_of_rewards,
    pass_all_k,
    pass_at_k,
    success_rate,
    variance_share,
)


@st.composite
def counts(draw):
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(counts())
def test_pass_at_k_and_pass_all_k_equal_enumeration_of_subsets(case):
    n, c, k = case
    outcomes = [i < c for i in range(n)]
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_all_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@st.composite
def ballots(draw):
    """Answers of up to 7 rollouts, each with whether it was solved; None is no answer."""
    answers = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=7))
    return [(answer, draw(st.booleans())) for answer in answers], draw(st.integers(1, len(answers)))


@given(ballots())
def test_majority_at_k_equals_enumeration_of_subsets(case):
    given_answers, k = case
    solved = {a: [ok for other, ok in given_answers if other == a] for a, _ in given_answers}
    total, num_subsets = Fraction(0), 0
    for subset in combinations([answer for answer, _ in given_answers], k):
        num_subsets += 1
        votes = Counter(answer for answer in subset if answer is not None)
        winners = [a for a, count in votes.items() if count == max(votes.values())]
        for winner in winners:
            total += Fraction(sum(solved[winner]), len(solved[winner]) * len(winners))
    votes = tuple((len(ok), sum(ok)) for answer, ok in solved.items() if answer is not None)
    found = majority_at_k(votes, len(solved.get(None, [])), k)
    assert found == pytest.approx(float(total / num_subsets))
    assert 0.0 <= found <= 1.0


def test_a_majority_of_many_is_found_in_whole_numbers():
    assert majority_at_k(((40, 40), (24, 0)), 0, 64) == 1.0
    assert majority_at_k(tuple((1, int(i < 16)) for i in range(64)), 0, 33) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="n=3, c=0, k=4"):
        majority_at_k(((3, 3),), 0, 4)


def test_a_majority_of_thousands_is_as_exact():
    """Of two answers, the hypergeometric distribution; there are more ways than a float holds."""
    first, second, k = 1100, 1000, 600
    whole = math.comb(first + second, k)
    won = sum(math.comb(first, x) * math.comb(second, k - x) for x in range(k // 2 + 1, k + 1))
    tied = Fraction(math.comb(first, k // 2) * math.comb(second, k // 2), 2)
    expected = float((won + tied) / whole)
    assert majority_at_k(((second, 0), (first, first)), 0, k) == pytest.approx(expected, rel=1e-9)


@given(counts())
def test_pass_at_k_rises_and_pass_all_k_falls_with_k(case):
    n, c, k = case
    assert pass_at_k(n, c, 1) == pytest.approx(c / n) == pytest.approx(pass_all_k(n, c, 1))
    if k > 1:
        assert pass_at_k(n, c, k) >= pass_at_k(n, c, k - 1) - 1e-12
        assert pass_all_k(n, c, k) <= pass_all_k(n, c, k - 1) + 1e-12
    # Failures are successes seen from the other side.
    assert pass_at_k(n, c, k) == pytest.approx(1 - pass_all_k(n, n - c, k))


def test_pass_at_k_is_unbiased_for_the_chance_that_one_of_k_succeeds():
    p, n, k = 0.3, 6, 3
    expected = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k)


def test_pass_at_k_stays_exact_for_thousands_of_rollouts():
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)


@pytest.mark.parametrize("case", [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_impossible_counts_are_refused(case):
    for function in (pass_at_k, pass_all_k):
        with pytest.raises(ValueError, match="1 <= k <= n"):
            function(*case)


@pytest.mark.parametrize(
    ("probability", "df", "expected"),
    [
        (0.975, 1, 12.706204736),
        (0.975, 2, 4.302652730),
        (0.975, 9, 2.262157163),
        (0.975, 29, 2.045229642),
        (0.975, 63, 1.998340543),
        (0.975, 199, 1.971956544),
        (0.975, 10_000, 1.960201240),
        (0.95, 5, 2.015048373),
        (0.995, 7, 3.499483297),
        (0.025, 9, -2.262157163),
        (0.5, 3, 0.0),
    ],
)
def test_t_quantile_equals_the_tables(probability, df, expected):
    assert t_quantile(probability, df) == pytest.approx(expected, abs=2e-8)


@given(st.floats(0.001, 0.999), st.integers(1, 3000))
@settings(max_examples=60)
def test_t_cdf_undoes_t_quantile(probability, df):
    assert t_cdf(t_quantile(probability, df), df) == pytest.approx(probability, abs=1e-9)


@given(st.floats(0.1, 60.0), st.floats(0.1, 60.0), st.integers(0, 2**20))
def test_incomplete_beta_is_symmetric_and_a_probability(a, b, numerator):
    x = numerator / 2**20  # 1 - x is exact: near 0 a rounded one would move x**a visibly
    value = incomplete_beta(a, b, x)
    assert -1e-9 <= value <= 1 + 1e-9
    assert value == pytest.approx(1 - incomplete_beta(b, a, 1 - x), abs=1e-7)


def test_incomplete_beta_equals_its_closed_form():
    # I_x(1, b) = 1 - (1 - x)^b
    assert incomplete_beta(1.0, 7.0, 0.2) == pytest.approx(1 - 0.8**7, rel=1e-12)


@given(st.floats(0.05, 200.0), st.floats(0.05, 200.0), st.floats(0.001, 0.999))
def test_beta_quantile_undoes_the_incomplete_beta(a, b, probability):
    x = beta_quantile(probability, a, b, tolerance=1e-12)
    assert incomplete_beta(a, b, max(0.0, x - 1e-11)) <= probability + 1e-12
    assert incomplete_beta(a, b, min(1.0, x + 1e-11)) >= probability - 1e-12


def test_single_rollouts_have_the_interval_of_jeffreys_widened_by_t():
    # The beta distribution with the mean and variance of Beta(7.5, 13.5), times (t_19 / z)^2.
    a, b, widening = 7.5, 13.5, (2.0930240544 / 1.9599639845) ** 2
    mean = a / (a + b)
    size = (a + b + 1) / widening - 1
    estimate = success_rate([(1, 1)] * 7 + [(1, 0)] * 13, 1, every=False)
    assert estimate.mean == 0.35
    assert estimate.low == pytest.approx(beta_quantile(0.025, mean * size, (1 - mean) * size))
    assert estimate.high == pytest.approx(beta_quantile(0.975, mean * size, (1 - mean) * size))


def test_tasks_with_fewer_than_k_rollouts_are_left_out():
    estimate = success_rate([(4, 2), (4, 1), (1, 1)], 2, every=True)
    assert estimate.num_tasks == 2
    assert estimate.mean == pytest.approx(1 / 12)
    assert success_rate([(1, 1)], 2, every=False) is None


def test_one_task_has_no_interval():
    estimate = mean_of_rewards([[0.25]])
    assert (estimate.mean, estimate.low, estimate.high) == (0.25, None, None)
    assert mean_of_rewards([[], []]) is None


def test_all_tasks_alike_give_the_exact_binomial_bound_and_not_a_point():
    none = success_rate([(4, 0)] * 64, 1, every=False)
    every = success_rate([(4, 4)] * 64, 4, every=True)
    bound = 1 - 0.025 ** (1 / 64)
    assert (none.low, none.high) == (0.0, pytest.approx(bound))
    assert (every.low, every.high) == (pytest.approx(1 - bound), 1.0)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=30), st.sampled_from([1, 2, 4]))
@settings(max_examples=60)
def test_pass_at_k_is_the_mirror_image_of_pass_all_k(solved, k):
    at = success_rate([(4, c) for c in solved], k, every=False)
    all_k = success_rate([(4, 4 - c) for c in solved], k, every=True)
    assert 0.0 <= at.low <= at.mean <= at.high <= 1.0
    assert (at.low, at.high) == (
        pytest.approx(1 - all_k.high, abs=1e-6),
        pytest.approx(1 - all_k.low, abs=1e-6),
    )


@given(st.lists(st.lists(st.integers(0, 64), max_size=3), min_size=2, max_size=20))
@settings(max_examples=60)
def test_rewards_are_measured_on_their_own_range(parts):
    rewards = [[part / 64 for part in task] for task in parts]
    estimate = mean_of_rewards(rewards)
    stretched = mean_of_rewards(
        [[10 * one - 5 for one in task] for task in rewards], minimum=-5, maximum=5
    )
    if estimate is None or estimate.low is None:
        return
    assert 0.0 <= estimate.low <= estimate.mean <= estimate.high <= 1.0
    for name in ("low", "mean", "high"):
        there = 10 * getattr(estimate, name) - 5
        assert getattr(stretched, name) == pytest.approx(there, abs=1e-5)


def test_rewards_that_are_counts_have_the_interval_of_pass_at_1():
    counts = [(4, c) for c in (0, 1, 4, 4, 2)]
    rewards = [[2.0] * c + [-1.0] * (n - c) for n, c in counts]
    rate = success_rate(counts, 1, every=False)
    estimate = mean_of_rewards(rewards, minimum=-1.0, maximum=2.0)
    assert estimate.mean == pytest.approx(3 * rate.mean - 1)
    assert estimate.low == pytest.approx(3 * rate.low - 1)
    assert estimate.high == pytest.approx(3 * rate.high - 1)
    rounded = [[one - 1e-13 if one == 2.0 else one for one in task] for task in rewards]
    assert mean_of_rewards(rounded, minimum=-1.0, maximum=2.0) == estimate


def test_repeating_rollouts_of_the_same_tasks_hardly_narrows_the_interval():
    once = success_rate([(1, 0), (1, 1), (1, 1), (1, 0)] * 5, 1, every=False)
    often = success_rate([(50, 0), (50, 50), (50, 50), (50, 0)] * 5, 1, every=False)
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.01)


def test_the_share_of_the_variance_tells_tasks_that_are_alike_from_always_or_never():
    rates = [c / 8 for c in range(9)]
    alike = variance_share({(8, 3): 10, (8, 4): 20, (8, 5): 10}, rates)
    apart = variance_share({(8, 0): 20, (8, 8): 20}, rates)
    assert alike < 0.2  # 1 / 8 if they are exactly alike
    assert apart > 0.9
    # k = n: a task's score is 0 or 1, whatever its chance of success is.
    assert variance_share({(8, 4): 40}, [0.0] * 8 + [1.0]) == 1.0
