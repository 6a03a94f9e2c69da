"""`advantage_norm = "parts"`: GDPO (arXiv:2601.05242), against its formula one number at a time."""

import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.types import Group
from telescope_train.rollouts.accept import has_signal
from telescope_train.rollouts.compared import RewardScale
from telescope_train.step.credit import NoCredit, assign_credit
from telescope_train.step.shaping import KlPenalties

sys.path.insert(0, str(Path(__file__).parent))
from test_credit import group, rules_of

WEIGHTS = {"right": 1.0, "short": 0.5, "rude": -0.25}
FLOOR = 1e-4


def of_parts(group_id: str, parts: list[dict[str, float]], environment: str = "toy") -> Group:
    totals = [math.fsum(WEIGHTS[k] * v for k, v in one.items()) for one in parts]
    made = group(group_id, totals, environment)
    rollouts = zip(made.rollouts, parts, strict=True)
    return replace(made, rollouts=tuple(replace(r, rewards=own) for r, own in rollouts))


def credit(*groups: Group, weights=None, kl=None, **settings):
    rules = rules_of(norm="parts", **settings)
    rules = replace(rules, weights={"toy": WEIGHTS} if weights is None else weights)
    return assign_credit(groups, rules, kl_penalties=kl)


def slow(groups: list[list[dict[str, float]]]) -> list[float]:
    """The formulas of the paper with weights, deviations with ddof 1."""
    added = []
    for rollouts in groups:
        sums = [0.0] * len(rollouts)
        for name, weight in WEIGHTS.items():
            values = [one[name] for one in rollouts]
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            for index, value in enumerate(values):
                sums[index] += weight * (value - mean) / deviation if deviation else 0.0
        added += sums
    deviation = statistics.stdev(added)
    return [(value - statistics.fmean(added)) / (deviation + FLOOR) for value in added]


VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])
PARTS = st.fixed_dictionaries(dict.fromkeys(WEIGHTS, VALUES))
GROUPS = st.lists(st.lists(PARTS, min_size=2, max_size=5), min_size=1, max_size=4)


@given(GROUPS)
def test_each_part_is_normalized_in_its_group_and_their_sum_over_the_batch(groups):
    # Groups that teach nothing are kept, as in the paper, which does not leave them out.
    result = credit(*(of_parts(str(i), one) for i, one in enumerate(groups)), discard=False)
    assert list(result.advantages.values()) == pytest.approx(slow(groups), abs=1e-9)


def test_rewards_that_add_up_to_the_same_are_told_apart():
    """The collapse that the paper is about: (0, 1) and (1, 0) beside (0, 0) and (1, 1)."""
    weights = {"toy": {"right": 1.0, "short": 1.0}}
    parts = [{"right": a, "short": b} for a, b in ((1, 0), (1, 0), (1, 0), (0, 1))]
    made = group("g", [1.0] * 4)
    made = replace(
        made,
        rollouts=tuple(replace(r, rewards=p) for r, p in zip(made.rollouts, parts, strict=True)),
    )
    # Here the deviations are equal, so that the parts cancel: neither is worth more.
    assert credit(made, weights=weights).discarded == {"g": NoCredit.ALL_EQUAL}
    weights["toy"]["short"] = 0.5
    assert not credit(made, weights=weights).discarded
    assert has_signal(made) == "all_equal"
    assert has_signal(made, RewardScale(weights=weights)) is True
    assert has_signal(made, RewardScale(weights={"toy": {"right": 1.0}})) is True


@given(GROUPS, st.floats(0.125, 8, width=16), st.floats(-4, 4, width=16))
def test_the_scale_of_a_part_does_not_matter(groups, factor, shift):
    """Weights alone decide how much a part counts."""
    groups = [[dict(one) for one in rollouts] for rollouts in groups]
    before = credit(*(of_parts(str(i), one) for i, one in enumerate(groups)))
    for rollouts in groups:
        for one in rollouts:
            one["short"] = one["short"] * factor + shift
    after = credit(*(of_parts(str(i), one) for i, one in enumerate(groups)))
    for key, advantage in before.advantages.items():
        assert after.advantages[key] == pytest.approx(advantage, abs=1e-9)


def test_a_part_without_differences_teaches_nothing_and_widens_nothing():
    rollouts = [{"right": float(i % 2), "short": 0.1 + 0.2, "rude": 0.3} for i in range(4)]
    with_them = credit(of_parts("g", rollouts))
    alone = credit(of_parts("g", rollouts), weights={"toy": {"right": 1.0}})
    assert with_them.advantages == alone.advantages
    equal = [{"right": 0.1 + 0.2, "short": 1.0, "rude": 0.0}] * 3
    assert credit(of_parts("g", equal)).discarded == {"g": NoCredit.ALL_EQUAL}


def test_groups_that_teach_nothing_do_not_narrow_the_deviation():
    teaching = of_parts("a", [{"right": float(i), "short": 0.0, "rude": 0.0} for i in range(3)])
    equal = of_parts("b", [{"right": 1.0, "short": 1.0, "rude": 0.0}] * 3)
    alone, beside = credit(teaching), credit(teaching, equal)
    assert [beside.advantages["a", i] for i in range(3)] == list(alone.advantages.values())


def test_parts_that_cancel_at_different_scales_teach_nothing():
    """Else what is left by rounding, or by a floor, would be divided by its own deviation."""
    weights = {"toy": {"right": 1.0, "short": 1.0}}
    parts = [{"right": a, "short": 1 - a / 2 + 0.1} for a in (0.0, 2.0, 0.2, 0.0)]
    made = of_parts("g", [{**one, "rude": 0.0} for one in parts])
    assert credit(made, weights=weights).discarded == {"g": NoCredit.ALL_EQUAL}
    assert has_signal(made, RewardScale(weights=weights)) == "all_equal"


def test_only_rewards_that_are_clipped_are_counted_as_out_of_range():
    made = of_parts("g", [{"right": 3.0, "short": 0.0, "rude": 0.0}, {"right": 0.0, "short": 0.0}])
    span = {"reward_range": (0.0, 1.0)}
    assert credit(made, **span).metrics["rewards/outside_range"] == 0
    assert credit(made, weights={}, **span).metrics["rewards/outside_range"] == 1


def test_a_part_that_a_rollout_was_not_given_counts_as_nothing():
    full = [{"right": 1.0, "short": 0.0, "rude": 0.0}, {"right": 0.0, "short": 1.0, "rude": 0.0}]
    sparse = [{"right": 1.0}, {"short": 1.0}]
    assert credit(of_parts("g", sparse)).advantages == credit(of_parts("g", full)).advantages


def test_a_reward_without_known_parts_is_one_part():
    """It counts as much as a part of weight 1, on whichever scale it is."""
    known = of_parts("a", [{"right": 1.0, "short": 0.0, "rude": 0.0}, {"right": 0.0}])
    whole = group("b", [70.0, 30.0], "other")
    both = credit(known, whole, temperatures={"toy": 1.0, "other": 1.0})
    assert both.advantages["b", 0] == pytest.approx(both.advantages["a", 0], rel=1e-3)
    # Where some rollouts have no parts, none is taken apart: their sum would be another reward.
    mixed = replace(
        known, rollouts=(known.rollouts[0], replace(known.rollouts[1], rewards={}, reward=0.75))
    )
    assert credit(mixed).advantages["a", 0] == pytest.approx(math.sqrt(0.5), rel=1e-2)


def test_penalties_keep_their_size():
    """One is in units of the deviation of a part of weight 1, and is not normalized itself."""
    made = of_parts("g", [{"right": float(i < 2), "short": 0.0, "rude": 0.0} for i in range(4)])
    tiny = KlPenalties(of_agents={("g", 0): {"": -0.01}}, num_tokens=1)
    found = list(credit(made, kl=tiny).advantages.values())
    deviation = statistics.stdev([1, 1, 0, 0])
    added = [0.5 / deviation - 0.01, 0.5 / deviation, -0.5 / deviation, -0.5 / deviation]
    mean = statistics.fmean(added)
    expected = [(one - mean) / (statistics.stdev(added) + FLOOR) for one in added]
    assert found == pytest.approx(expected, abs=1e-9)


def test_the_correlation_is_with_the_rewards_themselves():
    rollouts = [{"right": float(i % 2), "short": i / 8, "rude": 0.0} for i in range(8)]
    found = credit(of_parts("g", rollouts)).metrics["advantage/reward_correlation"]
    assert 0.5 < found < 0.999
