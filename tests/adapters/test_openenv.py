"""OpenEnv servers through our adapter: the real package serves, in its own virtual environment."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.adapters.linking import keeps_contract, link, opened, played, serving, telescope

from telescope_core import Completion, Message, RolloutStatus, Split, StopReason, ToolCall
from telescope_envs.install.adapted import environment_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
SERVERS = Path(__file__).with_name("openenv_servers.py")
GUESSES = [str(n) for n in (4, 2, 6, 1, 3, 5, 7, 8)]
SEEDS = list(range(1, 21, 2))
WRONG = "9"
WIDE = {"reward_min": -1.0}


@pytest.fixture(scope="module")
def servers(home):
    """Servers of the package of OpenEnv, in its virtual environment, and what `itself` gave."""
    python = environment_for("openenv", ["openenv==0.10.0"]).python
    with serving([python, SERVERS, json.dumps(SEEDS), json.dumps(GUESSES)]) as told:
        names = {name: f"openenv:http://127.0.0.1:{at}" for name, at in told["ports"].items()}
        yield names, told["itself"]


@pytest.fixture(scope="module")
def guess(servers):
    """A server with room for one session, as is usual."""
    return servers[0]["guess"]


async def test_a_server_with_one_session_keeps_the_contract(servers, guess):
    link(guess, "--settings", json.dumps(WIDE))
    theirs = servers[1]
    async with opened(guess) as client:
        await keeps_contract(client, GUESSES, theirs[0])
        ours = [(await played(client, GUESSES, index=i)).reward for i in range(len(SEEDS))]
    assert ours == theirs


async def test_rollouts_wait_for_sessions_that_others_have(guess):
    async with opened(guess, {**WIDE, "max_sessions": 8}) as client:
        rollouts = await asyncio.gather(*(played(client, GUESSES, rollout=i) for i in range(8)))
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.KEPT}


async def test_tasks_of_a_server_are_examples(guess):
    async with opened(guess, {**WIDE, "environment": "guess"}) as client:
        about = await client.describe()
        assert dict(about.num_examples) == {Split.TRAIN: 6, Split.EVAL: 2}
        held_out = await client.example(Split.EVAL, 1)
        assert (held_out.id, held_out.info["reset"]) == ("test-1", {"index": 11})
        assert (await played(client, GUESSES, split=Split.EVAL)).status is RolloutStatus.KEPT


async def test_a_server_that_fails_is_no_reward(guess):
    async with opened(guess, WIDE) as client:
        failed = await played(client, ["break"])
        assert (failed.status, failed.reward) == (RolloutStatus.FAILED, None)
        assert "the server broke" in failed.error
        mute = await played(client, ["give up"], rollout=3)
        assert (mute.reward, mute.status_reason) == (None, "RewardError")
        shown = "prompt:\nGuess 1-8.\n\nrule:\nWrong ones cost 0.1."
        assert mute.messages[0].content == shown, "no text of an observation is left out"
        outside = await played(client, [WRONG], rollout=1)
        assert "outside its declared range [-1, 1]" in outside.error
        assert (await played(client, GUESSES, rollout=2)).status is RolloutStatus.KEPT


async def test_tools_are_offered_and_called(servers):
    call = ToolCall(id="c", name="add", arguments='{"a": 1, "b": 2}')
    wrong = ToolCall(id="d", name="add", arguments="[1")
    said = Completion(
        message=Message(role="assistant", content="", tool_calls=(call, wrong)),
        finish_reason="tool_calls",
    )
    async with opened(servers[0]["tools"]) as client:
        rollout = await played(client, [said, "3"])
    assert rollout.error is None
    results = [message.content for message in rollout.messages if message.role == "tool"]
    assert results[0] == "3"
    assert "no JSON object" in results[1]
    assert rollout.stop_reason is StopReason.COMPLETED


async def test_a_game_of_several_players_is_a_match(servers):
    def numbers(messages):
        return {"player-0": "3", "player-1": "5"}[messages[0].content.split()[-1].rstrip(".")]

    name = servers[0]["higher"]
    async with opened(name, {**WIDE, "players": 2}) as client:
        rollout = await played(client, numbers)
        assert rollout.error is None
        drawn = await played(client, ["4", "4"], rollout=1)
    async with opened(name, {**WIDE, "players": 3}) as client:
        other = await played(client, numbers, rollout=2)
    async with opened(name, WIDE) as client:
        alone = await played(client, ["3", "5"], rollout=3)
    assert rollout.metrics["seat_reward/player-0"] == -1.0
    assert rollout.metrics["seat_reward/player-1"] == 1.0
    assert rollout.reward == 0.0
    first, second = rollout.conversations
    assert first[1].content == "You are player 0."
    assert second[1].content == "You are player 1.\n3!"
    assert (drawn.reward, drawn.status_reason) == (None, "RewardError")
    assert "env.players is 3" in other.error
    assert "for 2 players" in alone.error


async def test_a_player_is_told_what_is_new_whether_or_not_a_game_repeats_it(servers):
    told = {}
    async with opened(servers[0]["hints"]) as client:
        # Seeds of one split are odd, and those of the other one even.
        for split in Split:
            rollout = await played(client, ["1", "2", "3"], split=split)
            assert (rollout.error, rollout.reward) == (None, 1.0)
            said = [one.content for one in rollout.messages if one.role == "user"]
            told[said[0]] = said[1:]
    assert told == {
        "Guess 1 or 2.": ["Not that one."] * 2,
        "[GAME] Guess 1 or 2.": [f"[Player] {n}\n[GAME] Not that one." for n in (1, 2)],
    }


def test_addresses_that_are_none_are_refused(home):
    done = telescope("env", "link", "openenv:localhost")
    assert done.returncode == 3
    assert "http or https address" in done.stderr
