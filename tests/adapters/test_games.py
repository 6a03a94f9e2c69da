"""Gymnasium and TextArena through their adapters: the rewards are those of their own loops."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.adapters.linking import by_itself, keeps_contract, link, opened, played, telescope

from telescope_adapters.gymnasium import uncolored
from telescope_core import Split, StopReason
from telescope_core.errors import TelescopeError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
LAKE, GUESS = "gym:FrozenLake-v1", "textarena:GuessTheNumber-v0"
DOWN_TO_GOAL = ["down", "down", "I go right", "Right.", "down", "right"]
STILL = '{"options": {"is_slippery": false}}'
LAKE_ITSELF = """
import json, sys, gymnasium
words = ["left", "down", "right", "up"]
def play(seed, moves):
    game = gymnasium.make("FrozenLake-v1", is_slippery=True)
    game.reset(seed=seed)
    total = 0.0
    for move in moves:
        _, gained, over, cut, _ = game.step(words.index(move))
        total += gained
        if over or cut:
            break
    return total
print(json.dumps([play(seed, json.loads(sys.argv[1])) for seed in range(1, 33, 2)]))
"""
EATEN = """
import asyncio, json, gymnasium
from gymnasium import spaces
from telescope_adapters.gymnasium import GymEnvironment
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split

class Eats(gymnasium.Env):
    metadata = {"render_modes": []}
    observation_space, action_space = spaces.Text(99), spaces.Text(9)
    def __init__(self, food, render_mode=None):
        self.food = food
    def reset(self, *, seed=None, options=None):
        return self.food.pop(), {}
    def step(self, action):
        return "", float(action == self.food.pop()), True, False, {}

gymnasium.register("Eats-v0", Eats)

async def main():
    options = {"food": ["a", "b", "c"]}
    made = GymEnvironment.from_settings({"id": "Eats-v0", "options": options})
    client = InProcessEnvironment(made, name="eats")
    asked = (PlayRequest(split=Split.TRAIN, example_index=0, group_id="g", index=i,
                         sampling=Sampling(max_tokens=8), deadline_s=300.0) for i in range(6))
    policy = ScriptedClient(["b"]).policy("r")
    played = await asyncio.gather(*(client.play(one, policy) for one in asked))
    return [[one.messages[0].content, one.reward, one.error] for one in played]

print(json.dumps(asyncio.run(main())))
"""
"""Plays an environment of Gymnasium that changes what it is made with."""
DEALT_ITSELF = """
import json, sys, textarena
def play(seed, moves):
    game = textarena.make("Blackjack-v0-raw")
    game.reset(num_players=1, seed=seed)
    for move in moves:
        game.get_observation()
        done, _ = game.step(action=move)
        if done:
            return game.close()[0][0]
print(json.dumps([play(seed, json.loads(sys.argv[1])) for seed in range(1, 25, 2)]))
"""
GUESS_ITSELF = """
import json, sys, textarena
def play(seed, guesses):
    game = textarena.make("GuessTheNumber-v0")
    game.reset(num_players=1, seed=seed)
    for guess in guesses:
        game.get_observation()
        done, _ = game.step(action=guess)
        if done:
            return game.close()[0][0]
print(json.dumps([play(seed, json.loads(sys.argv[1])) for seed in range(1, 17, 2)]))
"""

MATCHES_ITSELF = """
import json, sys, textarena
def play(name, players, moves, seed):
    game = textarena.make(f"{name}-raw")
    game.reset(num_players=players, seed=seed)
    for move in moves:
        game.get_observation()
        done, _ = game.step(action=move)
        if done:
            rewards = game.close()[0]
            return [float(rewards[player]) for player in range(players)]
print(json.dumps([[play(*one, seed) for seed in (1, 3, 5)] for one in json.loads(sys.argv[1])]))
"""
MATCHES = [
    ("TicTacToe-v0", 2, ["[4]", "[0]", "[2]", "[6]", "[3]", "[5]", "[1]", "[7]", "[8]"]),
    ("KuhnPoker-v0", 2, ["[Bet]", "[call]", "[Check]", "[check]", "[fold]"] * 12),
    ("LiarsDice-v0", 3, ["[Call]"] * 12),
    ("Snake-v0", 3, ["[up]"] * 60),
]
"""A game, its players, and the moves in the order in which they are asked for."""


@pytest.fixture(scope="module")
def lake(home):
    return link(LAKE, "--settings", STILL)


@pytest.fixture(scope="module")
def guess(home):
    return link(GUESS)


async def test_a_gymnasium_environment_keeps_the_contract(lake):
    async with opened(LAKE) as client:
        await keeps_contract(client, DOWN_TO_GOAL, 1.0)


async def test_what_is_seen_shows_where_the_player_is(lake):
    async with opened(LAKE) as client:
        rollout = await played(client, ["down", "fly", "right"])
    seen = [message.content for message in rollout.messages if message.role == "user"]
    assert "[S]FFF\nFHFH" in seen[0]
    assert "SFFF\n[F]HFH" in seen[1]
    assert seen[2].startswith("That names no action.\nAnswer with one of: left, down, right, up.")
    assert (rollout.stop_reason, rollout.reward) == (StopReason.COMPLETED, 0.0)


async def test_rewards_are_those_of_gymnasium(lake):
    moves = ["right", "down"] * 50
    theirs = by_itself(lake, LAKE_ITSELF, json.dumps(moves))
    async with opened(LAKE, {"options": {"is_slippery": True}, "max_turns": 100}) as client:
        ours = [(await played(client, moves, index=i)).reward for i in range(16)]
    assert ours == theirs


async def test_a_textarena_game_keeps_the_contract(guess):
    guesses = [f"[{n * 7 % 20 + 1}]" for n in range(10)] + ["[0]", "[0]"]
    theirs = by_itself(guess, GUESS_ITSELF, json.dumps(guesses))
    async with opened(GUESS) as client:
        await keeps_contract(client, guesses, theirs[0])
        ours = [await played(client, guesses, index=i) for i in range(8)]
    assert [rollout.reward for rollout in ours] == theirs
    assert len(set(theirs)) > 1, "the games differ"


async def test_an_answer_becomes_an_action_as_in_the_form_that_is_named(guess):
    plain = [str(n * 7 % 20 + 1) for n in range(12)]
    theirs = by_itself(guess, GUESS_ITSELF, json.dumps(plain))
    async with opened(GUESS) as client:
        ours = [(await played(client, plain, index=i)).reward for i in range(8)]
    async with opened(GUESS, {"id": "GuessTheNumber-v0-raw"}) as client:
        raw = await played(client, plain)
    assert ours == theirs
    assert theirs[0] > raw.reward == 0


async def test_several_players_are_told_who_speaks(guess):
    async with opened(GUESS, {"id": "ThreePlayerIPD-v0", "players": 3}) as client:
        rollout = await played(client, ["hello"] * 30)
    told = [one.content for one in rollout.conversations[0] if one.role == "user"]
    assert told[0].startswith("[GAME] ")
    assert "[Player 1] hello" in told[1]
    assert "[Player 2] hello" in told[1]
    assert "[Player 0]" not in told[1]


def test_an_environment_that_changes_what_it_is_made_with_is_made_anew(lake):
    assert by_itself(lake, EATEN) == [["c", 1.0, None]] * 6


async def test_games_side_by_side_draw_from_numbers_of_their_own(guess):
    moves = ["[Hit]", "[Stand]"] * 12
    theirs = by_itself(guess, DEALT_ITSELF, json.dumps(moves))
    async with opened(GUESS, {"id": "Blackjack-v0"}) as client:
        several = [played(client, moves, index=i) for i in range(len(theirs))]
        same = [played(client, moves, index=0, rollout=i) for i in range(6)]
        rollouts = await asyncio.gather(*several, *same)
    assert [rollout.reward for rollout in rollouts] == [*theirs, *theirs[:1] * 6]
    assert {rollout.messages for rollout in rollouts[len(theirs) :]} == {rollouts[0].messages}
    assert len(set(theirs)) > 1, "the games differ"


async def test_matches_of_textarena_give_each_player_its_own_reward(guess):
    theirs = by_itself(guess, MATCHES_ITSELF, json.dumps(MATCHES))
    for (name, players, moves), games in zip(MATCHES, theirs, strict=True):
        settings = {"id": name, "players": players, "reward_min": -100, "reward_max": 100}
        async with opened(GUESS, {**settings, "max_turns": 200}) as client:
            for index, rewards in enumerate(games):
                one = await played(client, moves, index=index)
                assert one.error is None
                seats = [one.metrics[f"seat_reward/player-{n}"] for n in range(players)]
                assert seats == rewards
                asked = [len(said) > 2 for said in one.conversations]
                assert list(one.agent_rewards.values()) == [
                    reward for reward, was_asked in zip(rewards, asked, strict=True) if was_asked
                ]
                assert [said[0].content for said in one.conversations] == [
                    f"You play player-{n}." for n in range(players)
                ]
    flat = [reward for games in theirs for rewards in games for reward in rewards]
    assert len(set(flat)) > 1, "some win and some lose"


async def test_an_observation_of_textarena_holds_only_what_is_new(guess):
    async with opened(GUESS) as client:
        rollout = await played(client, ["[1]", "[2]", "[3]"], split=Split.EVAL)
    seen = [message.content for message in rollout.messages if message.role == "user"]
    assert "Guess The Number" in seen[0]
    assert seen[0] not in seen[1]
    assert seen[1].rstrip(".").split()[-1] in ("higher", "lower")


async def test_a_move_that_a_game_repeats_is_not_shown_to_who_made_it(guess):
    games = {"Countdown-v0": "[0 1 +]", "Cryptarithm-v0": "[S 5]", "Slitherlink-v0": "[h 0 0]"}
    for name, move in games.items():
        async with opened(GUESS, {"id": name, "max_turns": 3}) as client:
            rollout = await played(client, ["my own words", move, move])
        assert rollout.error is None
        told = [message.content for message in rollout.messages if message.role == "user"]
        assert "invalid move" in told[1]
        assert "my own words" not in "".join(told)


async def test_an_eval_plays_a_linked_environment(lake, tmp_path):
    words = ["down", "down", "right", "right", "down", "right"]

    async def chat(request):
        body = await request.json()
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        said = {"role": "assistant", "content": words[turn]}
        choices = [{"index": 0, "finish_reason": "stop", "message": said}]
        return web.json_response({"model": "m", "choices": choices})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        told = ("--examples", "4", "--rollouts", "1", "--output", str(tmp_path / "eval"))
        done = await asyncio.to_thread(
            telescope, "eval", LAKE, "--base-url", url, "--model", "m", *told
        )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert (results["num_scored"], results["reward"]["mean"]) == (4, 1.0)


def test_names_that_are_no_environment_list_the_nearest(lake, guess):
    done = telescope("env", "link", "gym:FrozenLke-v1")
    assert done.returncode
    assert "'FrozenLake-v1'" in done.stderr, done.stderr
    for name, meant in (
        ("gyn:FrozenLake-v1", "'gym'"),
        ("textarena:GessTheNumber-v0", "'GuessTheNumber-v0'"),
        ("textarena:TicTacToe-v0", "--settings '{\"players\": 2}'"),
        ("textarena:QuantumTicTacToe-v0", "env.players = 1 (it has 2 players)"),
        ("gym:Blackjack-v1", '--settings \'{"observation": "value"}\''),
    ):
        with pytest.raises(TelescopeError) as refused:
            link(name)
        assert meant in str(refused.value)


def test_other_versions_are_refused_with_what_to_do(home):
    done = telescope("env", "link", LAKE, "--with", "gymnasium==1.1.0")
    assert done.returncode == 3
    assert "--with gymnasium==1.4.0" in done.stderr


def test_a_link_is_listed_and_removed(home):
    done = telescope("env", "link", "gym:CliffWalking-v1")
    assert done.returncode == 0, done.stderr
    listed = telescope("env", "list", "--installed").stdout
    assert "gym:CliffWalking-v1" in listed
    assert telescope("env", "uninstall", "gym:CliffWalking-v1").returncode == 0
    assert "CliffWalking" not in telescope("env", "list", "--installed").stdout


def test_colors_become_words():
    seen = uncolored("\x1b[41mS\x1b[0mF \x1b[34;1mR\x1b[0m|\x1b[43m \x1b[0m")
    assert seen.split("|") == ["[S]F R(blue)", "[  yellow]"]
