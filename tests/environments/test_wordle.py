"""Wordle: marks of repeated letters, games from first to last guess, reward, and the words."""

import itertools
from collections import Counter

import pytest
from tests.asking import ask

from telescope_core import Example, Message, Rollout, RolloutStatus, Sampling, Split, StopReason
from telescope_core.in_process import InProcessEnvironment
from telescope_core.playing.rollout import score_rollout
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_wordle import Wordle, feedback
from telescope_env_telescope_wordle.environment import read_guess
from telescope_env_telescope_wordle.words import WORDS


@pytest.mark.parametrize(
    ("guess", "hidden", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "moist", "-----"),
        ("geese", "elder", "-YY--"),
        ("speed", "erase", "Y-YY-"),
        ("allee", "apple", "GY--G"),
        ("eerie", "there", "Y-Y-G"),
        ("label", "hello", "Y--YY"),
        ("llama", "label", "GYY--"),
    ],
)
def test_marks(guess, hidden, marks):
    assert feedback(guess, hidden) == marks


def slow_feedback(guess: str, hidden: str) -> str:
    """Mark by crossing letters out on paper: places first, then the rest from the left."""
    rest, marks = list(hidden), ["-"] * 5
    for place in range(5):
        if guess[place] == hidden[place]:
            marks[place], rest[place] = "G", ""
    for place in range(5):
        if marks[place] == "-" and guess[place] in rest:
            marks[place] = "Y"
            rest[rest.index(guess[place])] = ""
    return "".join(marks)


def test_marks_of_every_arrangement_of_three_letters():
    words = ["".join(letters) for letters in itertools.product("abc", repeat=5)]
    for guess, hidden in itertools.product(words[::3], words[::7]):
        marks = feedback(guess, hidden)
        assert marks == slow_feedback(guess, hidden)
        for letter in set(guess):
            marked = sum(m != "-" for g, m in zip(guess, marks, strict=True) if g == letter)
            assert marked == min(Counter(guess)[letter], Counter(hidden)[letter])


def solver(messages) -> str:
    """Guess the first word that agrees with all marks so far."""
    fitting = list(WORDS)
    for message in messages:
        lines = message.content.splitlines()
        if message.role == "user" and len(lines) == 3:
            guess, marks = (line.replace(" ", "") for line in lines[:2])
            fitting = [word for word in fitting if feedback(guess, word) == marks]
    return f"<guess>{fitting[0]}</guess>"


async def play(environment, replies, *, index=0):
    request = ask(split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16))
    client = InProcessEnvironment(environment, name="wordle")
    return await client.play(request, ScriptedClient(replies).policy("r"))


@pytest.mark.slow
async def test_a_solver_that_reads_only_the_marks_finds_the_words():
    environment = Wordle(Wordle.Config(max_guesses=12))
    rollouts = [await play(environment, solver, index=index) for index in range(20)]
    assert all(rollout.status is RolloutStatus.KEPT for rollout in rollouts)
    assert [rollout.rewards["solved"] for rollout in rollouts] == [1.0] * 20
    assert all(rollout.messages[-1].role == "assistant" for rollout in rollouts)
    assert {rollout.metrics["invalid_guesses"] for rollout in rollouts} == {0.0}
    assert len({rollout.metrics["guesses"] for rollout in rollouts}) > 1


async def test_a_game_ends_after_the_last_guess():
    environment = Wordle(Wordle.Config(max_guesses=3))
    rollout = await play(environment, ["<guess>qqqqq</guess>"])
    assert rollout.stop_reason is StopReason.COMPLETED
    assert rollout.metrics["guesses"] == 3
    assert rollout.reward == 0.0
    assert [m.content.splitlines()[-1] for m in rollout.messages if m.role == "user"][1:] == [
        "Guess 2 of 3:",
        "Guess 3 of 3:",
    ]


async def test_what_is_no_guess_costs_one():
    environment = Wordle()
    word = environment.examples(Split.EVAL).example(0).answer
    rollout = await play(environment, ["I think", "<guess>long</guess>", f"<guess>{word}</guess>"])
    assert rollout.messages[2].content.startswith("That is no guess")
    assert rollout.metrics["invalid_guesses"] == 2
    assert rollout.reward == pytest.approx(0.7 + 0.2 + 0.1 * 0.6)
    assert rollout.reward >= environment.success_threshold


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("<guess>Crane</guess>", "crane"),
        ("<guess> crane\n</guess>", "crane"),
        ("<guess>crane</guess> no, <guess>slate</guess>", "slate"),
        ("crane", "crane"),
        ("I say crane", None),
        ("<guess>cranes</guess>", None),
        ("<guess>cr\u00e4ne</guess>", None),
        ("", None),
    ],
)
def test_reading_a_guess(text, guess):
    assert read_guess(text) == guess


async def test_a_part_is_for_the_best_guess_and_is_never_a_success():
    environment = Wordle()
    example = Example(id="elder", prompt="", answer="elder")

    async def reward_of(*texts: str) -> float:
        messages = tuple(Message(role="assistant", content=text) for text in texts)
        rollout = Rollout(environment="w", example_id="", group_id="", index=0, messages=messages)
        return (await score_rollout(environment, rollout, example)).reward

    assert await reward_of("geese", "qqqqq") == pytest.approx(0.2 * 2 * 0.5 / 5)
    assert await reward_of("older") == pytest.approx(0.2 * 4 / 5)
    assert await reward_of(*["qqqqq"] * 6, "elder") == 0.0, "a seventh guess does not count"


def test_the_words_and_their_splits():
    assert len(set(WORDS)) == len(WORDS) == 840
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in WORDS)
    ids = {
        (split, seed): {
            environment.examples(split).example(index).id
            for index in range(environment.examples(split).num_examples)
        }
        for seed in (0, 1)
        for environment in [Wordle(Wordle.Config(seed=seed))]
        for split in Split
    }
    assert ids[Split.TRAIN, 0] == ids[Split.TRAIN, 1], "a seed only moves the order"
    assert ids[Split.TRAIN, 0] | ids[Split.EVAL, 0] == set(WORDS)
    assert not ids[Split.TRAIN, 0] & ids[Split.EVAL, 0]
    assert 0.15 < len(ids[Split.EVAL, 0]) / len(WORDS) < 0.25
