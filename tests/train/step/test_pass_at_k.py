"""`pass_at_k`: a reward counts for the best of k rollouts (arXiv:2505.15201)."""

import itertools
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_train.algorithms import load_algorithm
from telescope_train.algorithms.advantages import best_of, leave_one_out
from telescope_train.rollouts.accept import has_signal
from telescope_train.rollouts.compared import RewardScale
from telescope_train.step.credit import NoCredit, assign_credit

sys.path.insert(0, str(Path(__file__).parent))
from test_credit import group, rules_of

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0, 0.1]), min_size=2, max_size=8)


def slow(rewards: list[float], k: int) -> list[float]:
    """Each choice of k rollouts, one at a time."""
    size = len(rewards)
    choices = list(itertools.combinations(range(size), k))
    return [
        statistics.fmean(max(rewards[i] for i in one) for one in choices if mine in one)
        * (k * (size - 1) / (size - k))
        for mine in range(size)
    ]


@given(REWARDS, st.integers(2, 7))
def test_it_is_the_mean_over_all_choices_of_k(rewards, k):
    found = best_of(np.array(rewards), k)
    if k >= len(rewards):
        assert not found.any()
    else:
        assert found.tolist() == pytest.approx(slow(rewards, k), abs=1e-12)


@given(REWARDS)
def test_of_one_the_rewards_stay_as_they_are(rewards):
    assert best_of(np.array(rewards), 1).tolist() == rewards


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_policy_gradient_is_that_of_the_best_of_k(k):
    """Every group of 4 answers that a policy over three answers can give, by its probability."""
    logits, rewards, size = np.array([0.3, -1.0, 0.4]), np.array([0.0, 1.0, 0.4]), 4
    probs = np.exp(logits) / np.exp(logits).sum()
    estimated = np.zeros(3)
    for answers in itertools.product(range(3), repeat=size):
        chance = math.prod(probs[one] for one in answers)
        of_group = best_of(rewards[list(answers)], k)
        advantages = leave_one_out(of_group, np.zeros(size, np.int64))
        # The derivative of the log-probability of an answer by the logits.
        slopes = np.eye(3)[list(answers)] - probs
        estimated += chance * (advantages[:, None] * slopes).mean(0)
    expected = np.zeros(3)
    for answers in itertools.product(range(3), repeat=k):
        chance = math.prod(probs[one] for one in answers)
        slope = (np.eye(3)[list(answers)] - probs).sum(0)
        expected += chance * max(rewards[list(answers)]) * slope
    np.testing.assert_allclose(estimated, expected, atol=1e-14)


def credit(*groups, k=2, **settings):
    rules = rules_of(**settings)
    section = rules.config.algorithm.model_copy(update={"pass_at_k": k})
    config = rules.config.model_copy(update={"algorithm": section})
    return assign_credit(groups, replace(rules, algorithm=load_algorithm("rloo"), config=config))


def test_rare_solutions_count_more_and_common_ones_less():
    rare, common = group("a", [1.0] + [0.0] * 7), group("b", [1.0] * 6 + [0.0] * 2)
    plain, best = credit(rare, common, k=1), credit(rare, common, k=4)
    assert best.advantages["a", 0] == pytest.approx(4 * plain.advantages["a", 0])
    # With 6 of 8, any 4 hold a right one: there is nothing to gain.
    assert plain.advantages["b", 0] > 0
    assert best.discarded == {"b": NoCredit.ANY_K_ALIKE}
    assert best.metrics["groups/any_k_alike"] == 1
    equal = credit(rare, group("b", [0.5] * 8), k=4)
    assert equal.discarded == {"b": NoCredit.ALL_EQUAL}
    assert best.advantages["b", 0] == 0.0


def test_groups_in_which_any_k_hold_the_best_have_no_signal():
    for right in range(9):
        one = group("g", [1.0] * right + [0.0] * (8 - right))
        expected = "any_k_alike" if right > 8 - 4 else True
        if right in (0, 8):
            expected = "all_equal"
        assert has_signal(one, RewardScale(pass_at_k=4)) == expected, right


def test_a_group_that_failures_made_too_small_is_left_out():
    made = credit(group("a", [1.0, 0.0, 0.0]), group("b", [1.0, 0.0]), k=2)
    assert made.discarded == {"b": NoCredit.TOO_FEW}


def test_correlation_is_with_the_rewards_themselves():
    made = credit(group("a", [1.0, 0.0, 0.0, 0.5]), k=2)
    assert 0.8 < made.metrics["advantage/reward_correlation"] < 1.0


def test_rewards_are_scaled_to_their_range_before():
    span = {"reward_range": (0.0, 10.0)}
    small = credit(group("a", [1.0, 0.0, 0.0, 0.5]))
    large = credit(group("a", [10.0, 0.0, -3.0, 5.0]), **span)
    assert large.advantages == pytest.approx(small.advantages)
