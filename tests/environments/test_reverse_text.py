"""Reverse text: the reward grows with the longest common part, and starts beyond chance."""

import pytest

from telescope_core import Message, Rollout, Split
from telescope_core.playing.rollout import score_rollout
from telescope_env_telescope_reverse_text import ReverseText
from telescope_env_telescope_reverse_text.environment import FREE_SHARE, common_share


def slow_common(said: str, wanted: str) -> float:
    """Try every part of the right text."""
    parts = {
        wanted[start:end] for start in range(len(wanted)) for end in range(start, len(wanted) + 1)
    }
    longest = max(len(part) for part in parts if part in said)
    return longest / max(len(said), len(wanted)) if said else 0.0


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("abc", "abc"), ("", "abc"), ("xbcx", "abcd"), ("ab ab abc", "abc"), ("cba", "abc")],
)
def test_the_share_in_common(said, wanted):
    assert common_share(said, wanted) == pytest.approx(slow_common(said, wanted))


async def reward_of(environment: ReverseText, example, text: str) -> Rollout:
    messages = (Message(role="assistant", content=text),)
    rollout = Rollout(environment="r", example_id="", group_id="", index=0, messages=messages)
    return await score_rollout(environment, rollout, example)


async def test_the_reward_grows_with_what_is_right():
    environment = ReverseText()
    example = environment.examples(Split.EVAL).example(0)
    rewards = []
    for num_right in range(0, len(example.answer) + 1, 5):
        text = example.answer[:num_right] + "#" * (len(example.answer) - num_right)
        rollout = await reward_of(environment, example, f"<reversed>{text}</reversed>")
        rewards.append(rollout.reward)
    assert rewards == sorted(rewards)
    assert rewards[0] == 0.0 < rewards[-1]
    assert len({*rewards}) > len(rewards) / 2
    whole = await reward_of(environment, example, f"<reversed> {example.answer}\n</reversed>")
    assert (whole.reward, whole.metrics["exact"]) == (1.0, 1.0)


async def test_the_right_text_within_a_longer_one_earns_less():
    environment = ReverseText()
    example = environment.examples(Split.EVAL).example(0)
    padded = f"<reversed>{example.answer}{'z' * len(example.answer)}</reversed>"
    rollout = await reward_of(environment, example, padded)
    assert rollout.reward == pytest.approx((0.5 - FREE_SHARE) / (1 - FREE_SHARE))
    assert rollout.metrics["exact"] == 0.0
    untagged = await reward_of(environment, example, example.answer)
    assert untagged.reward == 0.0


def test_no_text_is_near_its_own_reverse():
    source = ReverseText().examples(Split.TRAIN)
    for index in range(200):
        example = source.example(index)
        assert example.answer == example.id[::-1]
        assert common_share(example.id, example.answer) <= FREE_SHARE
