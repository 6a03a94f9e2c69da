import functools
import math
import operator
import statistics
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError, UnknownNameError
from telescope_core.types import (
    Completion,
    Group,
    Message,
    Rollout,
    RolloutStatus,
    Sampling,
    StopReason,
    Turn,
)
from telescope_train.algorithms import load_algorithm
from telescope_train.algorithms.advantages import centered, normalized, whitened
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.accept import has_signal
from telescope_train.rollouts.compared import RewardRange
from telescope_train.step.credit import CreditRules, NoCredit, assign_credit
from telescope_train.step.shaping import KlPenalties

GRPO = load_algorithm("grpo")


def config(*, reward_range=(None, None), norm="group", discard=True, **algorithm) -> TrainConfig:
    low, high = reward_range
    return TrainConfig.model_validate(
        {
            "run": {"name": "r", "number_of_steps": 1},
            "model": {"model": "m"},
            "environments": [{"name": "toy", "reward_min": low, "reward_max": high}],
            "algorithm": {"advantage_norm": norm, **algorithm},
            "rollout": {"discard_group_zero_advantage": discard},
        }
    )


def completion(num_tokens: int = 1, *, cut: bool = False) -> Completion:
    return Completion(
        message=Message(role="assistant", content=""),
        finish_reason="length" if cut else "stop",
        tokens=sampled_tokens((1, 2), (3,) * num_tokens, (-0.5,) * num_tokens),
        num_completion_tokens=num_tokens,
    )


def group(
    group_id: str, rewards: list[float | None], environment: str = "toy", written=()
) -> Group:
    written = written or [completion()] * len(rewards)
    rollouts = tuple(
        Rollout(
            environment=environment,
            example_id="e",
            group_id=group_id,
            index=index,
            turns=(Turn(completion=written[index], started_s=0.0, ended_s=1.0),),
            reward=reward,
            status=RolloutStatus.FAILED if reward is None else RolloutStatus.KEPT,
        )
        for index, reward in enumerate(rewards)
    )
    return Group(id=group_id, environment=environment, example_id="e", rollouts=rollouts)


def rules_of(declared=None, temperatures=None, **settings_) -> CreditRules:
    temperatures = {"toy": 0.8} if temperatures is None else temperatures
    return CreditRules(
        algorithm=GRPO,
        config=config(**settings_),
        sampling={
            name: Sampling(max_tokens=10, temperature=value) for name, value in temperatures.items()
        },
        vocab_size=100,
        declared=declared or {},
    )


def credit(*groups: Group, kl=None, built=None, **rules):
    return assign_credit(groups, rules_of(**rules), kl_penalties=kl, built=built)


def slow_advantages(rewards_by_group: list[list[float]], norm: str) -> list[float]:
    """The formulas, one number at a time."""
    centered = [[r - statistics.fmean(rewards) for r in rewards] for rewards in rewards_by_group]
    every = [value for values in centered for value in values]
    result = []
    for rewards, values in zip(rewards_by_group, centered, strict=True):
        deviation = statistics.stdev(rewards if norm == "group" else every)
        result += [value / (deviation + 1e-4) for value in values]
    return result


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda rewards_N: rewards_N[:-1], r"shape \(4,\) with 0 that"),
        (lambda rewards_N: rewards_N[:, None], r"shape \(5, 1\) with 0 that"),
        (lambda rewards_N: rewards_N.sum(), r"shape \(\) with 0 that"),
        (lambda rewards_N: np.full_like(rewards_N, math.inf), r"shape \(5,\) with 5 that"),
    ],
)
def test_advantages_other_than_one_number_a_rollout_are_refused(returned, got, monkeypatch):
    mine = replace(GRPO, name="mine", advantage=lambda rewards_N, *_: returned(rewards_N))
    monkeypatch.setitem(globals(), "GRPO", mine)
    with pytest.raises(ConfigError, match=rf"algorithm 'mine' .* shape \(5,\); got {got}"):
        credit(group("a", [1.0, 0.0, 1.0]), group("b", [0.0, 1.0]))


REWARDS = st.lists(
    st.lists(st.floats(-2, 2, width=16), min_size=2, max_size=5), min_size=1, max_size=4
)


def _advantages(rewards_by_group, norm):
    sizes = [len(rewards) for rewards in rewards_by_group]
    return normalized(
        np.concatenate(rewards_by_group), np.repeat(np.arange(len(sizes)), sizes), norm
    )


@pytest.mark.parametrize("norm", ["group", "batch"])
@settings(max_examples=80)
@given(rewards=REWARDS)
def test_advantages_equal_the_slow_version(rewards, norm):
    np.testing.assert_allclose(
        _advantages(rewards, norm), slow_advantages(rewards, norm), atol=1e-9
    )


@pytest.mark.parametrize("norm", ["group", "batch"])
@settings(max_examples=50)
@given(rewards=REWARDS, shift=st.integers(-3, 3), seed=st.integers(0, 99))
def test_advantages_ignore_shifts_and_follow_permutations(rewards, norm, shift, seed):
    sizes = [len(group_rewards) for group_rewards in rewards]
    rewards_N, groups_N = np.concatenate(rewards), np.repeat(np.arange(len(sizes)), sizes)
    expected_N = normalized(rewards_N, groups_N, norm)
    np.testing.assert_allclose(normalized(rewards_N + shift, groups_N, norm), expected_N, atol=1e-7)
    order_N = np.random.default_rng(seed).permutation(len(rewards_N))
    shuffled_N = normalized(rewards_N[order_N], 7 - groups_N[order_N], norm)
    np.testing.assert_allclose(shuffled_N, expected_N[order_N], atol=1e-9)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_advantages_ignore_scale_but_for_the_floor(norm):
    rewards = [[0.0, 1.0, 5.0], [2.0, 3.0]]
    large = [[1e6 * reward for reward in group_rewards] for group_rewards in rewards]
    np.testing.assert_allclose(_advantages(large, norm), _advantages(rewards, norm), rtol=3e-4)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_equal_rewards_have_exactly_no_advantage(norm):
    advantages_N = _advantages([[0.1] * 7, [0.0, 1.0]], norm)
    assert advantages_N[:7].tolist() == [0.0] * 7
    assert advantages_N[7:].all()


@pytest.mark.parametrize("norm", ["group", "batch"])
@given(parts=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=8), data=st.data())
def test_the_same_parts_summed_in_any_order_have_exactly_no_advantage(norm, parts, data):
    orders = data.draw(st.lists(st.permutations(parts), min_size=2, max_size=5))
    rewards = [functools.reduce(operator.add, order) for order in orders]
    advantages_N = _advantages([rewards, [0.0, 1.0]], norm)
    assert not advantages_N[:-2].any()
    assert advantages_N[-2:].all()
    assert not whitened(np.array(rewards)).any()


@given(
    base=st.floats(-1e9, 1e9).filter(lambda base: abs(base) > 1e-9),
    units=st.lists(st.integers(-40, 40), min_size=2, max_size=5),
)
def test_rewards_are_equal_up_to_rounding_and_no_further(base, units):
    rewards_N = np.array([base + unit * math.ulp(base) for unit in units])
    exact = [Fraction(reward) for reward in rewards_N]
    spread, largest = max(exact) - min(exact), max(abs(reward) for reward in exact)
    mean = sum(exact) / len(exact)
    expected = [float(reward - mean) for reward in exact]
    if spread <= 8 * Fraction(2) ** -52 * max(largest, 1):
        expected = [0.0] * len(exact)
    # The mean itself is rounded.
    slack = 4 * math.ulp(float(largest))
    found_N = centered(rewards_N, np.zeros(len(units), dtype=np.int64))
    np.testing.assert_allclose(found_N, expected, rtol=0, atol=slack if any(expected) else 0.0)


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0]])
def test_a_group_equal_but_for_rounding_has_no_signal(rewards):
    found = credit(group("g", rewards))
    assert found.discarded == {"g": NoCredit.ALL_EQUAL}
    assert has_signal(group("g", rewards)) == "all_equal"


def test_a_sum_of_parts_is_at_the_end_of_its_range_but_for_rounding():
    best, worst = 0.7 + 0.2 + 0.1, 0.3 - 0.1 - 0.2
    assert (best < 1.0, worst < 0.0) == (True, True)
    groups = group("best", [best, best]), group("worst", [worst, worst])
    found = credit(*groups, declared={"toy": RewardRange(0.0, 1.0)})
    ends = {"best": NoCredit.ALL_AT_MAXIMUM, "worst": NoCredit.ALL_AT_MINIMUM}
    assert found.discarded == ends
    assert credit(*groups, reward_range=(0.0, 1.0)).metrics["rewards/outside_range"] == 0
    too_high = credit(group("g", [1.1, worst]), reward_range=(0.0, 1.0))
    assert too_high.metrics["rewards/outside_range"] == 1


def test_maxrl_takes_a_sum_of_parts_that_is_zero_but_for_rounding():
    """A mean of 1e-17 would blow such a group up to the advantages of one success in four."""
    advantage = load_algorithm("maxrl").advantage
    rewards_N = np.array([0.1 + 0.2 - 0.3, 0.0, 0.0, 0.0, 0.3 - 0.1 - 0.2, 1.0])
    assert rewards_N[0] > 0.0 > rewards_N[4]
    found_N = advantage(rewards_N, np.array([0, 0, 0, 0, 1, 1]), "group")
    assert found_N.tolist() == [0.0, 0.0, 0.0, 0.0, -1.0, 1.0]
    with pytest.raises(ConfigError, match=r"at least 0, got -0\.1"):
        advantage(np.array([-0.1, 1.0]), np.array([0, 0]), "group")


def test_a_group_of_one_and_an_unknown_norm_are_refused():
    with pytest.raises(ValueError, match="at least 2 rollouts, got one of 1"):
        _advantages([[1.0], [0.0, 1.0]], "group")
    with pytest.raises(UnknownNameError, match="'batch'"):
        _advantages([[1.0, 0.0]], "batched")


def test_rollouts_become_samples_with_their_advantage_and_temperature():
    result = credit(group("a", [1.0, 0.0]), group("b", [0.0, 3.0]))
    expected = slow_advantages([[1.0, 0.0], [0.0, 3.0]], "group")
    assert [sample.advantage for sample in result.samples] == pytest.approx(expected)
    assert list(result.advantages) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert {sample.temperature for sample in result.samples} == {0.8}
    assert result.metrics["advantage/mean"] == pytest.approx(0.0)
    assert result.metrics["advantage/std"] == pytest.approx(np.std(expected))


def test_groups_without_advantage_are_dropped_and_counted_by_reason():
    groups = [
        group("high", [1.0, 1.0]),
        group("low", [0.0, 0.0]),
        group("middle", [0.5, 0.5]),
        group("few", [1.0, None]),
        group("good", [1.0, 0.0, None]),
    ]
    result = credit(*groups, declared={"toy": RewardRange(0.0, 1.0)})
    assert result.discarded == {
        "high": NoCredit.ALL_AT_MAXIMUM,
        "low": NoCredit.ALL_AT_MINIMUM,
        "middle": NoCredit.ALL_EQUAL,
        "few": NoCredit.TOO_FEW,
    }
    assert {sample.group_id for sample in result.samples} == {"good"}
    assert [sample.rollout_index for sample in result.samples] == [0, 1]
    counts = {name: n for name, n in result.metrics.items() if name.startswith("groups/")}
    assert counts == {
        "groups/total": 5,
        "groups/discarded": 4,
        "groups/all_at_maximum": 1,
        "groups/all_at_minimum": 1,
        "groups/all_equal": 1,
        "groups/too_few": 1,
        "groups/any_k_alike": 0,
        "groups/all_filtered": 0,
    }


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("rule", ["outcome", "shared", "per_agent"])
@pytest.mark.parametrize("num_teaching", [1, 4, 16])
def test_groups_that_are_left_out_are_in_no_deviation_as_if_they_had_been_rejected(
    name, rule, num_teaching
):
    teaching = [group(f"t{n}", [1.0, 0.0, 0.25]) for n in range(num_teaching)]
    equal = [group(f"e{n}", [1.0] * 3) for n in range(16 - num_teaching)]

    def sizes(groups, **settings_) -> list[float]:
        rules = rules_of(norm="batch", branch_credit=rule, **settings_)
        rules = replace(rules, algorithm=load_algorithm(name))
        return [abs(sample.advantage) for sample in assign_credit(groups, rules).samples]

    found = sizes([*teaching, *equal])
    assert found == sizes(teaching)
    assert np.square(found).sum() / (len(found) - 1) == pytest.approx(1.0, rel=1e-3)
    # Of all that are kept it is the one of the paper, and then they count in denominators too.
    kept = sizes([*teaching, *equal], discard=False)
    assert np.square(kept).sum() / (len(kept) - 1) == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("middle", [0.5, 0.5000001])
def test_whitening_keeps_a_rollout_whose_reward_is_the_mean_of_the_batch(middle):
    """It is one of the N over which the paper takes the mean, as its neighbor is."""
    rules = replace(rules_of(), algorithm=load_algorithm("reinforce_pp"))
    groups = [group(name, [r]) for name, r in {"a": 0.0, "b": middle, "c": 1.0}.items()]
    found = assign_credit(groups, rules)
    assert not found.discarded
    assert len(token_weights(found.samples, "token", max_tokens=10)) == 3
    same = assign_credit([group(name, [0.5]) for name in "abc"], rules)
    assert set(same.discarded.values()) == {NoCredit.ALL_EQUAL}


def test_groups_without_advantage_stay_when_asked_but_too_small_ones_cannot():
    result = credit(group("same", [1.0, 1.0]), group("few", [1.0]), discard=False)
    assert [sample.advantage for sample in result.samples] == [0.0, 0.0]
    assert result.discarded == {"few": NoCredit.TOO_FEW}
    assert result.metrics["groups/all_equal"] == 1


def test_rewards_are_scaled_to_their_range_and_those_outside_counted():
    result = credit(group("a", [-1.0, 4.0]), group("b", [1.5, 3.0]), reward_range=(1.0, 3.0))
    expected = slow_advantages([[0.0, 1.0], [0.25, 1.0]], "group")
    assert [sample.advantage for sample in result.samples] == pytest.approx(expected)
    assert result.metrics["rewards/outside_range"] == 2


def test_groups_equal_only_after_clipping_are_at_the_maximum():
    result = credit(group("a", [2.0, 3.0]), reward_range=(0.0, 1.0))
    assert result.discarded == {"a": NoCredit.ALL_AT_MAXIMUM}
    assert result.samples == ()
    assert "advantage/mean" not in result.metrics


def test_nothing_in_gives_nothing_out():
    result = credit()
    assert (result.samples, result.discarded) == ((), {})


def test_an_environment_without_temperature_is_named():
    with pytest.raises(UnknownNameError, match="'toys'"):
        credit(group("a", [1.0, 0.0]), temperatures={"toys": 1.0})


def test_a_filtered_rollout_stays_in_the_baseline_and_leaves_the_loss():
    written = [completion(cut=True), completion(), completion()]
    groups = [group("a", [0.0, 1.0, 0.5], written=written)]
    plain, filtered = credit(*groups), credit(*groups, filter_overlong=True)
    assert filtered.advantages == plain.advantages
    assert filtered.filtered == {("a", 0): "overlong"}
    assert [sample.rollout_index for sample in filtered.samples] == [1, 2]
    assert filtered.samples[0].advantage == plain.samples[1].advantage
    weights = [
        token_weights(result.samples, "sequence", max_tokens=10) for result in (plain, filtered)
    ]
    assert [float(w[-1]) for w in weights] == pytest.approx([1 / 3, 1 / 2])
    assert filtered.metrics["filtered/overlong"] == 1
    assert filtered.metrics["filtered/fraction"] == pytest.approx(1 / 3)
    assert filtered.metrics["final_reward/mean"] == pytest.approx(0.75)


def reaching(stop_reason: StopReason, *rewards: float) -> Group:
    """A group whose first rollout ended for `stop_reason`, and the others by themselves."""
    whole = group("a", [*rewards])
    first, *others = whole.rollouts
    return replace(whole, rollouts=(replace(first, stop_reason=stop_reason), *others))


@pytest.mark.parametrize(
    ("stop_reason", "setting", "reason"),
    [
        (StopReason.TIMEOUT, "filter_timeout", "timeout"),
        (StopReason.CONTEXT_LENGTH, "filter_overlong", "overlong"),
    ],
)
def test_a_rollout_that_reached_a_limit_is_trained_on_or_masked(stop_reason, setting, reason):
    limited = reaching(stop_reason, 0.0, 1.0, 0.5)
    scored, masked = (credit(limited, **{setting: value}) for value in (False, True))
    # Its reward counts in the baseline either way: the others are not compared among themselves.
    assert scored.advantages == masked.advantages == credit(group("a", [0.0, 1.0, 0.5])).advantages
    assert scored.filtered == {}
    assert masked.filtered == {("a", 0): reason}
    assert [sample.rollout_index for sample in scored.samples] == [0, 1, 2]
    # What is no sample has no token in the loss, nor in its denominator.
    assert [sample.rollout_index for sample in masked.samples] == [1, 2]
    assert masked.metrics[f"filtered/{reason}"] == 1


def test_by_default_a_deadline_is_masked_and_a_full_context_is_trained_on():
    assert credit(reaching(StopReason.TIMEOUT, 0.0, 1.0)).filtered == {("a", 0): "timeout"}
    assert credit(reaching(StopReason.CONTEXT_LENGTH, 0.0, 1.0)).filtered == {}


def test_a_rollout_without_a_turn_has_its_reward_in_the_baseline_and_no_sample():
    whole = group("a", [0.0, 1.0])
    silent = replace(whole.rollouts[0], turns=(), stop_reason=StopReason.TIMEOUT)
    for filter_timeout in (False, True):
        limited = replace(whole, rollouts=(silent, whole.rollouts[1]))
        result = credit(limited, filter_timeout=filter_timeout)
        assert [sample.rollout_index for sample in result.samples] == [1]
        assert result.advantages == credit(whole).advantages


def test_a_group_emptied_by_filters_is_discarded_for_that_reason():
    groups = [group("a", [0.0, 1.0], written=[completion(cut=True)] * 2)]
    result = credit(*groups, filter_overlong=True)
    assert result.samples == ()
    assert result.discarded == {"a": NoCredit.ALL_FILTERED}
    assert result.metrics["groups/discarded"] == 1


def test_penalties_are_added_to_rewards_that_were_scaled_first():
    written = [completion(10), completion(8), completion(1)]
    groups = [group("a", [0.0, 4.0, 2.0], written=written)]
    result = credit(
        *groups,
        reward_range=(0.0, 2.0),
        overlong_penalty_factor=0.5,
        overlong_buffer_tokens=4,
        kl=KlPenalties(of_agents={("a", 2): {"": -0.25}}, k3=3.0, num_tokens=6),
    )
    shaped = [0.0 - 0.5, 1.0 - 0.25, 1.0 - 0.25]
    expected = slow_advantages([shaped], "group")
    assert list(result.advantages.values()) == pytest.approx(expected)
    assert result.metrics["reward_shaping/overlong"] == pytest.approx(-0.25)
    assert result.metrics["reward_shaping/kl"] == pytest.approx(-0.25)
    assert result.metrics["kl/reference"] == pytest.approx(0.5)
    assert result.metrics["final_reward/mean"] == pytest.approx(2.0), "as the environment gave it"


def test_a_rollout_that_was_not_kept_counts_for_nothing_whatever_its_reward():
    whole = group("a", [1.0, 0.0, 0.5, 1.0])
    for status in (RolloutStatus.DISCARDED, RolloutStatus.CANCELLED):
        last = replace(whole.rollouts[3], status=status)
        found = credit(replace(whole, rollouts=(*whole.rollouts[:3], last)))
        expected = credit(group("a", [1.0, 0.0, 0.5]))
        assert found.advantages == expected.advantages
        assert len(found.samples) == 3


def test_samples_of_an_earlier_call_are_used_again_with_the_same_advantage_alone():
    groups = group("a", [1.0, 0.0]), group("b", [0.0, 1.0])
    before = credit(*groups)
    built = {sample.rollout_key: [sample] for sample in before.samples}
    # The first group is shaped since then.
    shaped = KlPenalties(of_agents={("a", 0): {"": -3.0}})
    found, expected = (credit(*groups, kl=shaped, built=known) for known in (built, None))
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert (one.rollout_key, one.advantage) == (other.rollout_key, other.advantage)
    assert found.samples[0].advantage < 0 < before.samples[0].advantage
    assert all(one is built[one.rollout_key][0] for one in found.samples if one.group_id == "b")


def test_advantages_of_a_wrong_sign_are_seen(monkeypatch):
    rewards = [0.0, 1.0, 1.0, 0.0]
    assert credit(group("g", rewards)).metrics["advantage/reward_correlation"] == pytest.approx(1.0)
    assert "advantage/reward_correlation" not in credit(group("g", [1.0, 1.0])).metrics
    wrong = replace(GRPO, advantage=lambda *arguments: -normalized(*arguments))
    monkeypatch.setitem(globals(), "GRPO", wrong)
    assert credit(group("g", rewards)).metrics["advantage/reward_correlation"] < -0.99


def test_each_environment_has_its_share_of_the_gradient():
    temperatures = {"toy": 1.0, "other": 1.0}
    long = group("a", [0.0, 1.0], written=[completion(9)] * 2)
    short = group("b", [0.0, 1.0], environment="other")
    metrics = credit(long, short, temperatures=temperatures).metrics
    assert metrics["signal/toy/groups"] == metrics["signal/other/groups"] == 0.5
    assert metrics["signal/toy/share"] == pytest.approx(0.9)
    assert metrics["signal/other/share"] == pytest.approx(0.1)
    assert not [name for name in credit(long).metrics if name.startswith("signal/")]


def branched(*rollouts: tuple[float, str]) -> Group:
    """Return a group of rollouts of (reward, branches); a branch is its agent and 1 to 9 tokens.

    "m3 s1 m2" = the main agent's 3 tokens, 1 of a sub-agent, and 2 of the main agent's next branch.
    """

    def turns_of(branches: str):
        for number, branch in enumerate(branches.split()):
            num_tokens = int(branch[1])
            tokens = sampled_tokens((number, 7), (3,) * num_tokens, (-0.5,) * num_tokens)
            said = replace(completion(num_tokens), tokens=tokens)
            yield Turn(completion=said, started_s=0.0, ended_s=1.0, agent=branch[0])

    whole = group("g", [reward for reward, _ in rollouts])
    with_turns = [
        replace(rollout, turns=tuple(turns_of(branches)))
        for rollout, (_, branches) in zip(whole.rollouts, rollouts, strict=True)
    ]
    return replace(whole, rollouts=tuple(with_turns))


def by_branch(found) -> dict[int, list[float]]:
    """Return the advantage of each branch of each rollout, in their order."""
    advantages: dict[int, list[float]] = {}
    for sample in found.samples:
        advantages.setdefault(sample.rollout_index, []).append(sample.advantage)
    return advantages


def test_by_default_every_branch_has_the_advantage_of_its_rollout():
    found = credit(branched((1.0, "m3 s1 m2"), (0.0, "m1")))
    high, low = found.advantages["g", 0], found.advantages["g", 1]
    assert by_branch(found) == {0: [high] * 3, 1: [low]}
    assert (
        found.samples
        == credit(
            branched((1.0, "m3 s1 m2"), (0.0, "m1")), branch_credit="outcome", built=built_of(found)
        ).samples
    )


def built_of(found) -> dict:
    built: dict = {}
    for sample in found.samples:
        built.setdefault(sample.rollout_key, []).append(sample)
    return built


@pytest.mark.parametrize("weighting", ["token", "sequence", "constant"])
def test_shared_credit_gives_each_branch_an_equal_part_of_its_rollout(weighting):
    group_ = branched((1.0, "m3 s1 m8"), (0.0, "m1 m1"), (0.0, "m5"))
    parts = {}
    for rule in ("outcome", "shared"):
        found = credit(group_, branch_credit=rule)
        weights_N = token_weights(found.samples, weighting, max_tokens=10)
        parts[rule] = [
            (one.rollout_index, one.advantage * weight * int(one.mask.sum()))
            for one, weight in zip(found.samples, weights_N.tolist(), strict=True)
        ]
    for index, num_branches in enumerate((3, 2, 1)):
        whole = sum(part for at, part in parts["outcome"] if at == index)
        shares = [part for at, part in parts["shared"] if at == index]
        assert shares == pytest.approx([whole / num_branches] * num_branches)


def test_an_agent_is_compared_with_rollouts_in_which_it_took_part():
    """The rollouts without the sub-agent all fail, which is nothing that it did."""
    found = by_branch(
        credit(
            branched((1.0, "m3 s1 s2 m2"), (0.0, "m1 s3"), (0.0, "m1"), (0.0, "m1 t1")),
            branch_credit="per_agent",
        )
    )
    main = slow_advantages([[1.0, 0.0, 0.0, 0.0]], "group")
    sub = slow_advantages([[1.0, 0.0]], "group")
    assert found[0] == pytest.approx([main[0], sub[0], sub[0], main[0]])
    assert found[1] == pytest.approx([main[1], sub[1]])
    assert found[2] == pytest.approx([main[2]])
    # Agent t took part in one rollout alone: there is nothing to compare it with.
    assert found[3] == pytest.approx([main[3], 0.0])


@pytest.mark.parametrize("rule", ["outcome", "shared", "per_agent"])
def test_without_branches_every_rule_is_the_same(rule):
    groups = (group("a", [1.0, 0.0, 0.5]), group("b", [0.0, 1.0]))
    found = credit(*groups, branch_credit=rule)
    assert [one.advantage for one in found.samples] == list(found.advantages.values())


@pytest.mark.parametrize("rule", ["outcome", "shared", "per_agent"])
def test_seats_of_a_match_are_compared_with_the_same_seat(rule):
    """In each rollout the policy plays against itself, so their rewards are all the same."""
    won_by_x = [1.0, 0.0, 0.5, 1.0]
    played = branched(*((0.5, "x3 y2 x1") for _ in won_by_x))
    seats = [
        replace(rollout, agent_rewards={"x": won, "y": 1 - won})
        for rollout, won in zip(played.rollouts, won_by_x, strict=True)
    ]
    played = replace(played, rollouts=tuple(seats))
    result = credit(played, branch_credit=rule)
    assert result.discarded == {}, "equal rewards of rollouts say nothing of those of seats"
    assert has_signal(played) is True
    x_G = slow_advantages([won_by_x], "group")
    y_G = slow_advantages([[1 - won for won in won_by_x]], "group")
    assert by_branch(result) == {
        index: pytest.approx([x, y, x]) for index, (x, y) in enumerate(zip(x_G, y_G, strict=True))
    }


def test_matches_that_are_left_out_are_in_no_deviation_of_a_seat():
    def match(name: str, *won_by_x: float) -> Group:
        played = group(name, [0.5] * len(won_by_x))
        seats = [
            replace(
                one,
                turns=tuple(replace(one.turns[0], agent=seat) for seat in "xy"),
                agent_rewards={"x": won, "y": 0.5},
            )
            for one, won in zip(played.rollouts, won_by_x, strict=True)
        ]
        return replace(played, rollouts=tuple(seats))

    teaching = [match("a", 1.0, 0.0, 0.5), match("b", 0.0, 1.0, 0.0)]
    equal = [match(f"e{n}", 0.5, 0.5, 0.5) for n in range(14)]
    found = credit(*teaching, *equal, norm="batch")
    assert set(found.discarded) == {one.id for one in equal}
    alone = credit(*teaching, norm="batch")
    assert [one.advantage for one in found.samples] == [one.advantage for one in alone.samples]
    assert found.of_agents["e0", 0] == {"x": 0.0, "y": 0.0}


def test_a_seat_of_a_match_bears_its_own_penalties_alone():
    played = branched((0.5, "x1 y8"), (0.5, "x1 y2"), (0.5, "x1 y2"))
    won_by_y = [0.5, 0.5, 1.0]
    seats = [
        replace(one, agent_rewards={"x": 0.5, "y": won})
        for one, won in zip(played.rollouts, won_by_y, strict=True)
    ]
    kl = KlPenalties(of_agents={("g", 1): {"x": 0.0, "y": -0.125}})
    result = credit(
        replace(played, rollouts=tuple(seats)),
        overlong_penalty_factor=0.5,
        overlong_buffer_tokens=4,
        kl=kl,
    )
    y_G = slow_advantages([[0.5 - 0.25, 0.5 - 0.125, 1.0]], "group")
    assert by_branch(result) == {index: pytest.approx([0.0, y]) for index, y in enumerate(y_G)}, (
        "x always earned the same, and always wrote one token"
    )
    assert {key[1]: told for key, told in result.of_agents.items()} == {
        index: pytest.approx({"x": 0.0, "y": y}) for index, y in enumerate(y_G)
    }
    assert result.metrics["advantage/std"] == pytest.approx(np.std([*y_G, 0.0, 0.0, 0.0]))
    assert list(result.advantages.values()) == pytest.approx([y / 2 for y in y_G]), "their mean"


def test_a_match_in_which_every_seat_always_earns_the_same_teaches_nothing():
    played = branched((0.5, "x3 y2"), (0.5, "x1 y1"))
    seats = [replace(one, agent_rewards={"x": 1.0, "y": 0.0}) for one in played.rollouts]
    played = replace(played, rollouts=tuple(seats))
    result = credit(played)
    assert result.discarded == {"g": NoCredit.ALL_EQUAL}
    assert result.samples == ()
    assert has_signal(played) == "all_equal"


def test_rewards_of_seats_are_scaled_as_those_of_rollouts():
    played = branched((0.0, "x1 y1"), (0.0, "x1 y1"))
    seats = [
        replace(one, agent_rewards={"x": won, "y": -won})
        for one, won in zip(played.rollouts, (4.0, -4.0), strict=True)
    ]
    found = by_branch(credit(replace(played, rollouts=tuple(seats)), reward_range=(-8.0, 8.0)))
    # Of 0.75 and 0.25, not of 4 and -4; the floor of the deviation shows which.
    x_G = slow_advantages([[0.75, 0.25]], "group")
    y_G = slow_advantages([[0.25, 0.75]], "group")
    assert found[0] == pytest.approx([x_G[0], y_G[0]], rel=1e-9)
    assert found[1] == pytest.approx([x_G[1], y_G[1]], rel=1e-9)


@pytest.mark.parametrize("rule", ["shared", "per_agent"])
def test_branches_of_an_earlier_call_are_used_again(rule):
    played = branched((1.0, "m3 s1 m2"), (0.0, "m1 s2"))
    first = credit(played, branch_credit=rule)
    second = credit(played, branch_credit=rule, built=built_of(first))
    assert all(one is other for one, other in zip(first.samples, second.samples, strict=True))


@pytest.mark.parametrize(
    ("name", "norm"), [("grpo", "group"), ("grpo", "batch"), ("rloo", "group")]
)
def test_a_group_of_equal_rewards_weighs_its_divergence_by_tau_unless_it_is_divided(name, norm):
    """What the plan says of `kl_in_reward`: a deviation of the group takes tau out again."""

    def advantage(tau: float) -> float:
        kl = KlPenalties(of_agents={("same", n): {"": -tau * (9.0 + n)} for n in range(4)})
        rules = rules_of(norm=norm, kl_penalty_tau=tau, kl_in_reward=True)
        rules = replace(rules, algorithm=load_algorithm(name))
        groups = [group("same", [1.0] * 4), group("other", [1.0, 0.0, 1.0, 0.0])]
        return assign_credit(groups, rules, kl_penalties=kl).advantages["same", 0]

    ratio = advantage(0.01) / advantage(0.001)
    assert (
        (ratio < 1.1) if (name, norm) == ("grpo", "group") else ratio == pytest.approx(10, rel=0.1)
    )
