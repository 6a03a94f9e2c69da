"""Text games: every game starts with equal boards, three are solved, and the rest is refused."""

import itertools
import random
import re

import pytest
from tests.asking import ask

from telescope_core import Sampling, Split, StopReason
from telescope_core.errors import ConfigError, UnknownNameError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_text_games import TextGames
from telescope_env_telescope_text_games.names import GAMES, MATCHES, REFUSED, chosen_games
from telescope_env_telescope_text_games.play import SeededGame


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one == "RushHour" else [])
        for one in (*GAMES, *MATCHES)
    ],
)
def test_a_seed_gives_the_same_board_whatever_is_drawn_elsewhere(name):
    boards: list[str] = []
    for elsewhere in (1, 2):
        random.seed(elsewhere)
        before = random.getstate()
        boards.append(SeededGame(name, 7).told())
        assert random.getstate() == before, "nobody else's chance is changed"
    assert boards[0] == boards[1]
    assert len(boards[0]) > 40


def test_games_side_by_side_have_their_own_chance():
    def heard(*games: SeededGame) -> list[list[str]]:
        told: list[list[str]] = [[game.told()] for game in games]
        for move in ["[left]", "[right]"] * 4:
            for game, texts in zip(games, told, strict=True):
                assert game.move(move) is None
                texts.append(game.told())
        return told

    alone = [heard(SeededGame("2048", seed))[0] for seed in (1, 2)]
    assert heard(SeededGame("2048", 1), SeededGame("2048", 2)) == alone
    assert alone[0] != alone[1]


async def play(environment, replies, *, index=0):
    request = ask(
        split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16), deadline_s=60
    )
    client = InProcessEnvironment(environment, name="games")
    return await client.play(request, ScriptedClient(replies).policy("r"))


def halving(messages) -> str:
    """Guess the middle of what is left."""
    low, high = 1, 20
    pairs = [one.content for one in messages[1:]]
    for said, told in zip(pairs[::2], pairs[1::2], strict=False):
        guess = int(re.search(r"\[(\d+)\]", said)[1])
        low, high = (guess + 1, high) if "higher" in told else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def pegs(guess, code) -> tuple[int, int]:
    black = sum(one == other for one, other in zip(guess, code, strict=True))
    return black, len(set(guess) & set(code)) - black


def consistent(messages) -> str:
    """Guess the first code that agrees with all answers so far."""
    pairs = [one.content for one in messages[1:]]
    codes = list(itertools.permutations(range(1, 7), 4))
    for said, told in zip(pairs[::2], pairs[1::2], strict=False):
        guess = tuple(map(int, re.findall(r"\d", said)))
        black, white = map(int, re.search(r"(\d) black peg.* (\d) white", told).groups())
        codes = [code for code in codes if pegs(guess, code) == (black, white)]
    return f"[{' '.join(map(str, codes[0]))}]"


HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]


@pytest.mark.parametrize(
    ("name", "solver"),
    [("GuessTheNumber", halving), ("Mastermind", consistent), ("TowerOfHanoi", HANOI)],
)
async def test_a_solver_that_reads_only_what_it_is_told_wins(name, solver):
    environment = TextGames(TextGames.Config(games=name))
    for index in range(6):
        rollout = await play(environment, solver, index=index)
        assert rollout.reward == 1.0, rollout.messages
        assert rollout.tags["game"] == name
        assert rollout.metrics["broke_rules"] == 0.0
        assert rollout.metrics["moves"] == len(rollout.turns) <= 10


async def test_moves_against_the_rules_earn_nothing_however_much_was_done():
    environment = TextGames(TextGames.Config(games="TowerOfHanoi"))
    rollout = await play(environment, [*HANOI[:-1], "I win.", "I win."])
    assert (rollout.reward, rollout.metrics["broke_rules"]) == (0.0, 1.0)
    assert "invalid move" in rollout.messages[-2].content


async def test_a_move_in_thinking_is_not_made():
    environment = TextGames(TextGames.Config(games="TowerOfHanoi"))
    thought = [f"<think>{HANOI[0]} or {move}?</think>{move}" for move in HANOI]
    assert (await play(environment, thought)).reward == 1.0
    cut = [f"<think>{move}" for move in HANOI]
    assert (await play(environment, cut)).metrics["broke_rules"] == 1.0


async def test_a_game_that_does_not_end_earns_nothing():
    environment = TextGames(TextGames.Config(games="TowerOfHanoi", max_turns=3))
    rollout = await play(environment, HANOI)
    assert (rollout.reward, rollout.stop_reason) == (0.0, StopReason.MAX_TURNS)
    assert rollout.messages[-1].role == "assistant"


def test_names_of_games():
    assert chosen_games("all") == list(GAMES)
    assert chosen_games(" Sudoku-v0, 2048,Sudoku") == ["Sudoku", "2048"]
    assert not set(GAMES) & set(REFUSED)
    with pytest.raises(UnknownNameError, match="did you mean 'Mastermind'"):
        chosen_games("Mastrmind")
    with pytest.raises(ConfigError, match="'Wordle' cannot be played here: it downloads"):
        TextGames.from_settings({"games": "Wordle"})
    with pytest.raises(ConfigError, match="names no game"):
        chosen_games(" , ")
    assert chosen_games("Nim,TicTacToe") == ["Nim", "TicTacToe"]
    with pytest.raises(ConfigError, match="Nim for 2, Sudoku for 1"):
        TextGames.from_settings({"games": "Nim,Sudoku"})
    with pytest.raises(ConfigError, match="Mastermind is for one player"):
        TextGames.from_settings({"games": "Mastermind", "opponents": {"others": {}}})
    with pytest.raises(ConfigError, match="several players"):
        TextGames(TextGames.Config(games="Nim"))
    with pytest.raises(UnknownNameError, match="'player-1'"):
        TextGames.from_settings({"games": "Nim", "opponents": {"player1": {}}})


def first_free(messages) -> str:
    """Take the first cell that the board still shows by its number."""
    return f"[{re.findall(r'[0-8]', messages[-1].content.rpartition('Current Board')[2])[0]}]"


async def test_a_game_for_two_is_a_match_in_which_each_seat_has_its_reward():
    environment = TextGames.from_settings({"games": "TicTacToe"})
    rollout = await play(environment, first_free)
    assert rollout.error is None
    assert rollout.metrics["seat_reward/player-0"] == 1.0, "the cells 0, 2, 4 and 6 have a diagonal"
    assert rollout.metrics["seat_reward/player-1"] == 0.0
    assert (rollout.reward, rollout.tags["game"]) == (0.5, "TicTacToe")
    assert (rollout.metrics["broke_rules"], rollout.metrics["moves"]) == (0.0, 7.0)
    first, second = rollout.conversations
    assert "player-0" in first[0].content
    assert "Player 1" in second[1].content
    assert second[2].content == "[1]"


async def test_who_breaks_the_rules_of_a_match_has_lost_it():
    def replies(messages):
        is_second = "player-1" in messages[0].content
        return "I win." if is_second else first_free(messages)

    rollout = await play(TextGames.from_settings({"games": "TicTacToe"}), replies)
    assert rollout.metrics["seat_reward/player-0"] == 1.0
    assert rollout.metrics["seat_reward/player-1"] == 0.0
    assert rollout.metrics["broke_rules"] == 1.0


async def test_a_match_that_does_not_end_is_a_draw():
    environment = TextGames.from_settings({"games": "TicTacToe", "max_turns": 3})
    rollout = await play(environment, first_free)
    assert rollout.metrics["seat_reward/player-0"] == rollout.metrics["seat_reward/player-1"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", MATCHES)
async def test_every_match_gives_each_seat_a_reward(name):
    rollout = await play(TextGames.from_settings({"games": name}), ["I win."] * 500)
    assert rollout.error is None
    earned = [value for key, value in rollout.metrics.items() if key.startswith("seat_reward/")]
    assert len(earned) == MATCHES[name]
    assert all(0 <= one <= 1 for one in earned)


@pytest.mark.parametrize("name", GAMES)
def test_a_text_that_is_no_move_ends_a_game_and_is_told_why(name):
    game = SeededGame(name, 3)
    game.told()
    ended = game.move("")
    for _ in range(40):
        if ended is not None:
            break
        assert not re.search(r"Reason: -?[0-9.]+ ", game.told()), "the score, not the reason"
        ended = game.move("")
    assert ended is None or len(ended.scores) == 1
