"""Words and texts of the Gymnasium adapter, with a stand-in for the package."""

from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest

from telescope_adapters import gymnasium
from telescope_adapters.gymnasium import GymEnvironment
from telescope_core.errors import (
    EnvironmentLoadError,
    RewardError,
    UnknownNameError,
    UnplayableError,
)

TURNS = ("turn left", "turn right", "Turn", "stay")
SIGNS = ("+", "-", "*", "++", "go.left", "a/b")


class Discrete:
    start = 5

    def __init__(self, n):
        self.n = n


class Text:
    pass


class Room:
    """An environment that tells the last action and gives `gained` for it."""

    observation_space = Text()

    def __init__(self, num_actions=3, *, render_mode=None, drawn="a room", gained=0.0, seen=""):
        self.metadata = {"render_modes": ["ansi"]}
        self.action_space = Discrete(num_actions)
        self.drawn, self.gained, self.seen = drawn, gained, seen

    def reset(self, *, seed):
        return self.seen, {}

    def step(self, action):
        self.drawn = f"action {action}"
        return self.seen, self.gained, False, False, {}

    def render(self):
        return self.drawn

    def close(self):
        pass


@pytest.fixture
def new_game(monkeypatch):
    """Return a function that starts a game of `Room`, from the adapter's settings."""
    package = SimpleNamespace(
        registry=("Room-v0",),
        spaces=SimpleNamespace(Discrete=Discrete, Text=Text),
        make=lambda _id, **options: Room(**options),
    )
    monkeypatch.setattr(gymnasium, "imported", lambda *_: package)
    return lambda **given: GymEnvironment.from_settings({"id": "Room-v0", **given}).new_game()


@pytest.mark.parametrize(
    ("words", "text", "named"),
    [
        (TURNS, "turn left", 0),
        (TURNS, "I stay. No: **Turn\n right**!", 1),
        (TURNS, "turn right, then turn.", 2),
        (TURNS, "turn leftmost", 2),
        (TURNS, "stay-at-home, overturn", None),
        (SIGNS, "I take +.", 0),
        (SIGNS, "-", 1),
        (SIGNS, "2*3 is *", 2),
        (SIGNS, "+ or ++", 3),
        (SIGNS, "Go.left.", 4),
        (SIGNS, "goxleft", None),
        (SIGNS, "+, a/b", 5),
        (("up", "."), "up.", 0),
    ],
)
def test_the_last_action_in_an_answer_counts(new_game, words, text, named):
    game = new_game(actions=words, options={"num_actions": len(words)})
    told = game.step(text).text
    assert told.startswith("That names no action" if named is None else f"action {5 + named}\n")


@pytest.mark.parametrize("words", [("a", "A ", "b"), ("a", " ", "b"), ("turn left", "turn  left")])
def test_words_that_cannot_be_told_apart_are_refused(new_game, words):
    with pytest.raises(EnvironmentLoadError, match="different words"):
        new_game(actions=words, options={"num_actions": len(words)})


@pytest.mark.parametrize("in_a_dict", [False, True])
def test_large_observations_are_shown_whole(new_game, in_a_dict):
    pixels = np.arange(1600).reshape(40, 40)
    seen = {"pixels": pixels} if in_a_dict else pixels
    shown = new_game(observation="value", options={"seen": seen}).reset(1)
    numbers = shown.replace("[", " ").replace("]", " ").replace(",", " ").split()
    assert [int(one) for one in numbers if one.isdigit()][:1600] == list(range(1600))


def test_an_instruction_may_have_other_braces(new_game):
    asks = 'Answer {"action": WORD} or {}, with one of {actions}.'
    game = new_game(instruction=asks, actions=("a", "b", "c"))
    assert game.reset(1) == 'a room\nAnswer {"action": WORD} or {}, with one of a, b, c.'


def test_an_unknown_name_says_how_those_of_packages_are_named(new_game):
    with pytest.raises(UnknownNameError, match="gym:MODULE:Maze-v0"):
        new_game(id="Maze-v0")
    assert new_game(id="mazes:Maze-v0").reset(1)


@pytest.mark.parametrize("gained", [None, np.array([0.25, 0.5]), "much", np.nan])
def test_a_reward_that_is_no_number_names_the_environment(new_game, gained):
    game = new_game(options={"gained": gained})
    with pytest.raises(RewardError, match="Room-v0"):
        game.step("6")


def test_actions_without_names_have_the_numbers_of_their_space(new_game):
    game = new_game()
    assert game.reset(1).endswith("Answer with one of: 5, 6, 7.")
    assert game.step("I take 6, not 5: 6").text.startswith("action 6\n")
    assert game.step("1").text.startswith("That names no action")


@pytest.mark.parametrize("drawn", [None, StringIO("a room")])
def test_a_drawing_that_is_no_text_names_the_environment(new_game, drawn):
    with pytest.raises(UnplayableError, match=r"Room-v0: render\(\)"):
        new_game(options={"drawn": drawn}).reset(1)
    assert new_game(options={"drawn": drawn}, observation="value").reset(1)
