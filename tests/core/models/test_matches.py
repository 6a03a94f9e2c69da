"""Matches: seats of the policy and of opponents, each with its own conversation and reward."""

import asyncio

import pytest
from tests.asking import ask
from tests.core.chat.loopback_endpoint import reply, serving

from telescope_core import Example, ListSource, RolloutStatus, metric, reward
from telescope_core.base.messages import agent_of
from telescope_core.errors import (
    ConfigError,
    ContextLengthError,
    EnvironmentLoadError,
    UnknownNameError,
)
from telescope_core.gateway import Gateway, RecordingPolicy, forwarding, recording
from telescope_core.gateway.request import OLDER_VERSION
from telescope_core.in_process import InProcessEnvironment
from telescope_core.matches import MatchConfig, MatchEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Message, Sampling, Turn


class Higher(MatchEnvironment):
    """Both seats name a number at the same time; the higher one wins."""

    seats = ("left", "right")

    def examples(self, split):
        return ListSource([Example(id=f"game-{n}", prompt="Name a number.") for n in range(8)])

    async def play_match(self, match):
        seats = [match["left"], match["right"]]
        left, right = await asyncio.gather(*(seat.ask("Your number?") for seat in seats))
        won = 0.5 if left == right else float(int(left) > int(right))
        return {"left": won, "right": 1 - won}

    @metric
    def num_seats(self, episode):
        return len(episode.conversations)


def by_seat(**numbers):
    """A policy that answers with the number of whichever seat asks."""

    def answer(messages):
        seat = messages[0].content.removeprefix("You play ").rstrip(".")
        return str(numbers[seat])

    return ScriptedClient(answer)


async def play(settings=None, *, cls=Higher, index=0, policies=None):
    client = InProcessEnvironment(cls.from_settings(settings or {}), name="match")
    try:
        policies = policies or by_seat(left=3, right=5)
        return await client.play(ask(example_index=index), policies.policy("r"))
    finally:
        await client.close()


def opening(seat):
    return (Message(role="system", content=f"You play {seat}."),)


async def test_each_seat_has_a_conversation_and_a_reward_of_its_own():
    policies = by_seat(left=3, right=5)
    played = await play(policies=policies)
    assert played.error is None
    assert played.reward == 0.5
    assert played.agent_rewards == {agent_of(opening("left")): 0.0, agent_of(opening("right")): 1.0}
    assert len(set(played.agent_rewards)) == 2
    assert played.metrics == {
        "seat_reward/left": 0.0,
        "seat_reward/right": 1.0,
        "num_seats": 2.0,
    }
    for seat, conversation in zip(("left", "right"), played.conversations, strict=True):
        assert [one.role for one in conversation] == ["system", "user", "assistant"]
        assert seat in conversation[0].content
        assert conversation[1].content == "Name a number.\n\nYour number?"
    assert [one[-1].content for one in played.conversations] == ["3", "5"]
    assert played.messages == played.conversations[0]
    assert not [one for one in policies.requests if "assistant" in [m.role for m in one]], (
        "asked at the same time, no seat sees what the other one said"
    )


async def test_an_opponent_plays_its_seat_and_is_not_the_policy():
    async with serving(reply("4")) as (endpoint, client):
        one = {"base_url": client.base_url, "model": "tiny"}
        played = await play({"opponents": {"left": one}})
        assert played.error is None
        assert played.reward == 1.0
        assert played.agent_rewards == {agent_of(opening("right")): 1.0}
        assert (played.tags["seat/left"], played.tags["seat/right"]) == ("opponent", "policy")
        assert played.metrics["opponents.left/calls"] == 1
        assert [one.content for one in played.messages][-1] == "5", "the policy's seat is shown"
        (asked,) = endpoint.requests
        assert asked["messages"][0]["content"] == "You play left."

        seats = {}
        for index in range(8):
            again = [await play({"opponents": {"others": one}}, index=index) for _ in range(2)]
            assert again[0].tags == again[1].tags, "all rollouts of an example have the same seats"
            (seats[index],) = (name for name, who in again[0].tags.items() if who == "policy")
        assert set(seats.values()) == {"seat/left", "seat/right"}


async def test_an_opponent_that_fails_costs_the_rollout_and_is_no_defeat():
    async with serving(500) as (_, client):
        one = {"base_url": client.base_url, "model": "tiny", "retry_budget_s": 0}
        played = await play({"opponents": {"left": one}})
    assert played.status is RolloutStatus.FAILED
    assert played.reward is None
    assert "opponents.left" in played.error


@pytest.mark.parametrize(
    ("earned", "says"),
    [
        (None, "left"),
        ({"left": 1.0}, "right"),
        ({"left": 1.0, "right": None}, "right"),
        ({"left": float("nan"), "right": 0.0}, "left"),
        ({"left": 1.0, "right": 2.0}, r"\[0, 1\]"),
        ({"left": 1.0, "rigth": 0.0}, "right"),
    ],
)
async def test_a_seat_without_a_reward_fails_the_rollout(earned, says):
    class Odd(Higher):
        async def play_match(self, match):
            await super().play_match(match)
            return earned

    played = await play(cls=Odd)
    assert played.status is RolloutStatus.FAILED
    assert played.reward is None
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(played.error)


@pytest.mark.parametrize("seats", [(), ("one",), ("a", "a"), ("a", "others"), ["a", "b"], (1, 2)])
def test_seats_are_two_to_eight_different_names(seats):
    given = seats

    class Odd(Higher):
        seats = given

    with pytest.raises(EnvironmentLoadError, match="2 to 8 different names"):
        Odd.from_settings({})


def test_wrong_settings_and_rewards_of_the_whole_match_are_refused():
    class Whole(Higher):
        @reward
        def long(self, completion):
            return 1.0

    with pytest.raises(EnvironmentLoadError, match=r"long .* play_match"):
        Whole.from_settings({})
    with pytest.raises(UnknownNameError, match="'left'"):
        Higher.from_settings({"opponents": {"lef": {}}})
    with pytest.raises(ConfigError, match="leaves none to the policy"):
        Higher.from_settings({"opponents": {"left": {}, "right": {}}})
    assert MatchConfig().opponents == {}


async def test_two_seats_with_one_system_message_are_refused():
    class Same(Higher):
        def seat_prompt(self, seat, example):
            return "You play."

    played = await play(cls=Same)
    assert "seat_prompt" in played.error


async def test_a_match_that_ends_before_the_policy_was_asked_says_nothing_of_it():
    class Short(Higher):
        async def play_match(self, match):
            return {"left": 1.0, "right": 0.0}

    played = await play(cls=Short)
    assert played.status is RolloutStatus.FAILED
    assert "before the policy was asked" in played.error


async def test_a_match_that_is_cut_short_has_no_reward_and_says_why():
    class Long(Higher):
        async def play_match(self, match):
            for _ in range(9):
                await match["left"].ask("?")

    full = ContextLengthError("the prompt does not fit")
    played = await play(cls=Long, policies=ScriptedClient(["1", full]))
    assert played.status is RolloutStatus.FAILED
    assert played.reward is None
    assert "context_length" in played.error
    assert "play_match" in played.error


async def test_a_seat_that_is_misspelled_names_those_that_there_are():
    class Odd(Higher):
        async def play_match(self, match):
            await match["middle"].ask("?")

    played = await play(cls=Odd)
    assert "'middle'" in played.error
    assert "left" in played.error


async def test_what_the_policy_recorded_says_which_seat_asked():
    async with serving(reply("7")) as (_, client), forwarding(client) as policies:
        environment = InProcessEnvironment(Higher.from_settings({}), name="match")
        played = await recording(environment).play(ask(), policies.policy("r"))
        await environment.close()
    assert played.reward == 0.5
    assert {turn.agent for turn in played.turns} == set(played.agent_rewards)
    assert len(played.conversations) == 2


class TwoVersions(RecordingPolicy):
    """Answers 5 as the policy, and 4 as its version 12, which the server got in mid-answer."""

    def __init__(self):
        super().__init__()
        self.requests = []

    async def complete(self, messages, sampling, *, tools=()):
        said = Completion(message=Message(role="assistant", content="5"), finish_reason="stop")
        turn = Turn(completion=said, started_s=0.0, ended_s=1.0)
        self.recorder.answered(tuple(messages), turn)
        return said

    async def answer(self, request):
        self.requests.append(request)
        said = Message(role="assistant", content="4", reasoning="hm")
        return Completion(message=said, finish_reason="length", oldest_version=9, newest_version=12)


async def test_an_older_version_of_the_policy_plays_at_the_endpoint_of_the_rollout():
    class Twice(Higher):
        async def play_match(self, match):
            await match["left"].ask("Ready?")
            assert match["left"].was_cut
            return await super().play_match(match)

    policy, gateway = TwoVersions(), Gateway(model="policy")
    await gateway.start()
    policy.session = gateway.open(policy, Sampling(max_tokens=8), has_older=True)
    settings = {"opponents": {"left": {"older_version": True}}}
    environment = InProcessEnvironment(Twice.from_settings(settings), name="match")
    played = await recording(environment).play(ask(), policy)
    await environment.close()
    await gateway.close()
    assert played.error is None
    assert played.reward == 1.0
    assert (played.tags["seat/left"], played.tags["seat/right"]) == ("version 9 12", "policy")
    assert [turn.agent for turn in played.turns] == [agent_of(opening("right"))]
    assert [one.content for one in played.conversations[0]][-1] == "4"
    first, second = policy.requests
    assert (first.model, first.messages[0].content) == (OLDER_VERSION, "You play left.")
    assert first.sampling == Sampling(max_tokens=8), "as the policy is sampled"
    assert second.messages[2].reasoning == "hm", "its own thinking comes back to it"


@pytest.mark.parametrize("opponents", [{"left": {}}, {"others": {}}])
async def test_an_older_version_is_refused_where_there_is_none(opponents):
    older = {seat: {"older_version": True} for seat in opponents}
    async with serving(reply("7")) as (_, client), forwarding(client) as policies:
        environment = InProcessEnvironment(Higher.from_settings({"opponents": older}), name="match")
        played = await recording(environment).play(
            ask(), policies.policy("r", Sampling(max_tokens=8))
        )
        await environment.close()
    assert played.status is RolloutStatus.FAILED
    assert "opponent_num_servers" in played.error
    with pytest.raises(ConfigError, match="leave base_url, temperature out"):
        Higher.from_settings(
            {"opponents": {"left": {"older_version": True, "base_url": "x", "temperature": 1}}}
        )
