"""Which rollouts are filtered, what is added to rewards, and which groups are accepted."""

import math
import random
import string
from dataclasses import replace

import pytest

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError
from telescope_core.types import Completion, Group, Message, Rollout, RolloutStatus, Turn
from telescope_train.config.schema import AlgorithmSection
from telescope_train.rollouts.accept import load_accept_fn, rejection
from telescope_train.rollouts.compared import RewardRange, RewardScale
from telescope_train.rollouts.failures import Boundary, boundary_of
from telescope_train.step.filters import Filtered, compression_ratio, filter_reason
from telescope_train.step.shaping import KlPenalties, Shaping, overlong_penalty

VOCAB = 1000
UNIFORM = -math.log(VOCAB)


def rollout(text="", ids=(3,), logprobs=(-0.5,), *, cut=False, reward=1.0) -> Rollout:
    completion = Completion(
        message=Message(role="assistant", content=text),
        finish_reason="length" if cut else "stop",
        tokens=sampled_tokens((), ids, logprobs),
    )
    turn = Turn(completion=completion, started_s=0.0, ended_s=1.0)
    return Rollout(
        environment="toy", example_id="e", group_id="g", index=0, turns=(turn,), reward=reward
    )


def reason(played: Rollout, **settings) -> Filtered | None:
    return filter_reason(played, AlgorithmSection(**settings), vocab_size=VOCAB)


def test_nothing_is_filtered_by_default():
    assert reason(rollout("ab" * 5000, ids=(900_000,), logprobs=(-50.0,), cut=True)) is None


def test_gibberish_is_a_token_both_rare_and_less_likely_than_a_blind_draw():
    settings = {"filter_gibberish": True, "gibberish_token_threshold": 500}
    below, above = UNIFORM - 2.01, UNIFORM - 1.99
    assert reason(rollout(ids=(3, 501), logprobs=(-0.1, below)), **settings) is Filtered.GIBBERISH
    assert reason(rollout(ids=(3, 500), logprobs=(-0.1, below)), **settings) is None
    assert reason(rollout(ids=(3, 501), logprobs=(below, above)), **settings) is None


def test_repetition_is_told_by_compression_and_only_of_long_texts():
    generator = random.Random(0)
    noise = "".join(generator.choice(string.ascii_letters) for _ in range(5000))
    loop = "and so on, " * 500
    assert compression_ratio(noise) < 2
    assert compression_ratio(loop) > 20
    assert compression_ratio("a" * 99) == 1.0 < compression_ratio("a" * 100)
    end = noise * 2
    assert compression_ratio(loop + end) == compression_ratio(end), "10,000 characters are enough"
    assert compression_ratio(loop + end[1:]) != compression_ratio(end[1:])
    assert compression_ratio(noise + loop) < compression_ratio(noise * 2 + loop * 3)
    assert reason(rollout(loop), filter_repetition=True) is Filtered.REPETITION
    assert reason(rollout(noise), filter_repetition=True) is None
    high = {"filter_repetition": True, "repetition_compression_threshold": 1000.0}
    assert reason(rollout(loop), **high) is None


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (60, 0.0), (70, -0.125), (80, -0.25), (100, -0.5), (140, -0.5)],
)
def test_the_length_penalty_falls_over_the_buffer_and_no_further(num_tokens, expected):
    penalty = overlong_penalty(num_tokens, max_tokens=100, buffer=40, factor=0.5)
    assert penalty == pytest.approx(expected)


def test_divergences_of_parts_of_a_batch_add_up_to_those_of_the_whole():
    one = KlPenalties(of_agents={("a", 0): {"x": -0.25, "y": -0.5}}, k3=3.0, num_tokens=6)
    other = KlPenalties(of_agents={("b", 0): {"": -0.25}}, k3=1.0, num_tokens=2)
    whole = KlPenalties() | one | other
    assert whole.of_agents == {**one.of_agents, **other.of_agents}
    assert Shaping(kl=whole).metrics == {"reward_shaping/kl": -0.5, "kl/reference": 4.0 / 8}
    assert Shaping().metrics == {}, "no token was looked at"


def test_a_rollout_bears_the_length_of_its_worst_agent_and_the_divergence_of_all():
    played = rollout()
    key = (played.group_id, played.index)
    kl = KlPenalties(of_agents={key: {"x": -0.25, "y": -0.5}})
    shaping = Shaping(overlong={key: {"x": -1.0, "y": 0.0}, ("b", 0): {}}, kl=kl)
    assert shaping.of(played) == -1.0 - 0.75
    assert [shaping.of(played, agent) for agent in "xyz"] == [-1.25, -0.5, 0.0]
    assert shaping.metrics == {"reward_shaping/overlong": -0.5, "reward_shaping/kl": -0.75}
    for other in (replace(played, group_id="b"), replace(played, index=7)):
        assert shaping.of(other) == shaping.of(other, "x") == 0.0


def group(*rewards) -> Group:
    rollouts = tuple(
        replace(
            rollout(reward=reward),
            index=index,
            status=RolloutStatus.FAILED if reward is None else RolloutStatus.KEPT,
        )
        for index, reward in enumerate(rewards)
    )
    return Group(id="g", environment="toy", example_id="e", rollouts=rollouts)


@pytest.mark.parametrize(
    ("rewards", "ranges", "expected"),
    [
        ((0.0, 1.0, None), {}, True),
        ((1.0, 1.0, None), {}, "all_equal"),
        ((0.1 + 0.2, 0.3, 0.3), {}, "all_equal"),
        ((2.0, 3.0, 5.0), {}, True),
        ((2.0, 3.0, 5.0), {"toy": RewardRange(0.0, 1.0)}, "all_equal"),
        ((2.0, 3.0, 5.0), {"other": RewardRange(0.0, 1.0)}, True),
    ],
)
def test_has_signal_accepts_rewards_that_credit_tells_apart(rewards, ranges, expected):
    for name in ("has_signal", "telescope_train.rollouts.accept:has_signal"):
        assert load_accept_fn(name, RewardScale(ranges=ranges))(group(*rewards)) == expected


def test_what_an_accept_function_may_return():
    assert rejection(group(1.0), lambda one: True) is None
    assert rejection(group(1.0), lambda one: False) == "rejected"
    assert rejection(group(1.0), lambda one: "too easy") == "too easy"
    with pytest.raises(ConfigError, match="must return True, False or the reason"):
        rejection(group(1.0), lambda one: None)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("has_signl", "must be has_signal or module:function"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        (
            "telescope_train.rollouts.accept:has_signl",
            "no function 'has_signl'; did you mean has_signal",
        ),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, expected):
    with pytest.raises(ConfigError, match=expected):
        load_accept_fn(path)


@pytest.mark.parametrize(
    ("error", "boundary"),
    [
        ("EndpointError: no answer", Boundary.ENDPOINT),
        ("ProcessDiedError: gone", Boundary.ENDPOINT),
        ("RewardError: not a number", Boundary.REWARD),
        ("KeyError: 'x'", Boundary.ENVIRONMENT),
    ],
)
def test_failures_are_told_apart_by_boundary(error, boundary):
    failed = replace(rollout(), status=RolloutStatus.FAILED, error=error, reward=None)
    assert boundary_of(failed) is boundary
