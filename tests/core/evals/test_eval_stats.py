"""Eval statistics against enumeration, tables and simulation."""

import math
import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.evals.stats import (
    bootstrap_mean_of_tasks,
    clustered_mean,
    incomplete_beta,
    mean_of_tasks,
    pass_all_k,
    pass_at_k,
    t_cdf,
    t_quantile,
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
@settings(max_examples=60, deadline=None)
def test_t_cdf_undoes_t_quantile(probability, df):
    assert t_cdf(t_quantile(probability, df), df) == pytest.approx(probability, abs=1e-9)


@given(st.floats(0.1, 60.0), st.floats(0.1, 60.0), st.integers(0, 2**20))
@settings(deadline=None)
def test_incomplete_beta_is_symmetric_and_a_probability(a, b, numerator):
    x = numerator / 2**20  # 1 - x is exact: near 0 a rounded one would move x**a visibly
    value = incomplete_beta(a, b, x)
    assert -1e-9 <= value <= 1 + 1e-9
    assert value == pytest.approx(1 - incomplete_beta(b, a, 1 - x), abs=1e-7)


def test_incomplete_beta_equals_its_closed_form():
    # I_x(1, b) = 1 - (1 - x)^b
    assert incomplete_beta(1.0, 7.0, 0.2) == pytest.approx(1 - 0.8**7, rel=1e-12)


def test_clustered_interval_equals_the_formula_and_ignores_empty_tasks():
    estimate = clustered_mean([[1, 0], [0, 0], [1, 1], []], minimum=-10, maximum=10)
    means = [0.5, 0.0, 1.0]
    reach = 4.302652730 * (0.25 / 3) ** 0.5
    assert estimate.num_tasks == 3
    assert estimate.mean == pytest.approx(sum(means) / 3)
    assert estimate.low == pytest.approx(0.5 - reach)
    assert estimate.high == pytest.approx(0.5 + reach)
    assert clustered_mean([[], []]) is None


def test_one_task_has_no_interval():
    estimate = mean_of_tasks([0.25])
    assert (estimate.mean, estimate.low, estimate.high) == (0.25, None, None)


def test_all_tasks_alike_give_the_exact_binomial_bound_and_not_a_point():
    none = mean_of_tasks([0.0] * 64)
    every = bootstrap_mean_of_tasks([1.0] * 64)
    bound = 1 - 0.025 ** (1 / 64)
    assert (none.low, none.high) == (0.0, pytest.approx(bound))
    assert (every.low, every.high) == (pytest.approx(1 - bound), 1.0)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
@settings(deadline=None, max_examples=40)
def test_intervals_hold_the_mean_and_stay_in_range(values):
    for estimate in (mean_of_tasks(values), bootstrap_mean_of_tasks(values, num_resamples=100)):
        assert 0.0 <= estimate.low <= estimate.high <= 1.0
        assert estimate.low - 1e-9 <= mean_of_tasks(values).mean <= estimate.high + 1e-9 or (
            # a percentile interval of few resamples may miss the mean of very skewed tasks
            len(set(values)) <= 3
        )


def test_repeating_rollouts_of_the_same_tasks_does_not_narrow_the_interval():
    once = clustered_mean([[0.0], [1.0], [1.0], [0.0]])
    often = clustered_mean([[0.0] * 50, [1.0] * 50, [1.0] * 50, [0.0] * 50])
    assert (once.low, once.high) == (often.low, often.high)


def test_interval_covers_the_truth_as_often_as_it_says():
    draw = random.Random(0)
    covered = 0
    for _ in range(400):
        tasks = []
        for _ in range(30):
            p = draw.betavariate(1, 1)
            tasks.append([float(draw.random() < p) for _ in range(8)])
        estimate = clustered_mean(tasks)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= covered / 400 <= 0.98
