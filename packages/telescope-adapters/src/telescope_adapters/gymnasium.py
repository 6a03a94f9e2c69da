"""Gymnasium environments whose state can be read as text: `gym:ID`.

Text is what `render_mode="ansi"` draws, a `spaces.Text` observation, or, if the setting
`observation` asks for it, the observation's value. Actions are words, one for each number of a
`Discrete` space, or text for a `spaces.Text`.
"""

import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from importlib import import_module
from typing import Any, Literal

from telescope_adapters.frameworks import GYMNASIUM, imported
from telescope_adapters.games import GameConfig, GameEnvironment, GameStep
from telescope_adapters.settings import as_number, told_of_options
from telescope_core.base.errors import EnvironmentLoadError, UnplayableError, unknown_name

_COLORED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
_CODES = re.compile(r"\x1b\[[0-9;]*m")
_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_KNOWN_ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
}
"""Words for the actions of Gymnasium's own environments."""


class GymConfig(GameConfig):
    """Settings of a Gymnasium environment."""

    actions: tuple[str, ...] = ()
    """A word or a few for each action, in the order of their numbers; empty = those that are known,
    or the numbers."""
    observation: Literal["auto", "text", "value"] = "auto"
    """Observation for the player: the drawing or text of the environment, or the observation's
    value. `auto` takes the text, and refuses environments without one."""
    instruction: str = "Answer with one of: {actions}."
    """Added to each text; `{actions}` stands for the words."""


class GymEnvironment(GameEnvironment):
    """A Gymnasium environment."""

    Config = GymConfig

    def __init__(self, config: GymConfig | None = None) -> None:
        super().__init__(config)
        self.gymnasium = imported(GYMNASIUM, "gymnasium")
        name = self.config.id
        if ":" not in name and name not in self.gymnasium.registry:
            raise unknown_name(
                "Gymnasium environment",
                name,
                self.gymnasium.registry,
                f"(if a package registers it, put the module that does before the name, as in "
                f"gym:MODULE:{name}, and name the package with --with)",
            )
        self._is_drawn = False
        trial = self._made()
        try:
            self._is_drawn = "ansi" in trial.metadata.get("render_modes", ())
            self._require_text(trial)
            self.words = self._words(trial)
        finally:
            trial.close()

    def new_game(self) -> "_GymGame":
        """Return a game that has not started."""
        return _GymGame(self._made(), self.words, self.config, is_drawn=self._is_drawn)

    def _made(self) -> Any:
        is_drawn = self._is_drawn and self.config.observation != "value"
        mode = {"render_mode": "ansi"} if is_drawn else {}
        # A copy, because an environment may change what it is made with.
        with told_of_options(self.config.id):
            return self.gymnasium.make(self.config.id, **mode, **deepcopy(self.config.options))

    def _require_text(self, trial: Any) -> None:
        spaces = self.gymnasium.spaces
        has_text = self._is_drawn or isinstance(trial.observation_space, spaces.Text)
        if not has_text and self.config.observation != "value":
            raise EnvironmentLoadError(
                f"{self.config.id} shows {trial.observation_space} and draws "
                f"{', '.join(trial.metadata.get('render_modes', ())) or 'nothing'}, which is no "
                "text; to show the numbers as text, link it with --settings "
                '\'{"observation": "value"}\''
            )

    def _words(self, trial: Any) -> tuple[str, ...]:
        spaces, space = self.gymnasium.spaces, trial.action_space
        if isinstance(space, spaces.Text):
            return ()
        if not isinstance(space, spaces.Discrete):
            raise EnvironmentLoadError(
                f"{self.config.id} takes {space} as actions; this adapter takes Discrete, whose "
                "actions have names, and Text; wrap the environment in one that does"
            )
        count = int(space.n)
        known = _KNOWN_ACTIONS.get(self.config.id.rpartition("-v")[0], ())
        first = _first_of(space)
        words = self.config.actions or known or tuple(map(str, range(first, first + count)))
        different = {_spaced(word) for word in words} - {""}
        if len(words) != count or len(different) != count:
            raise EnvironmentLoadError(
                f"{self.config.id} has {count} actions, so env.actions needs {count} different "
                f"words, got {', '.join(words)}"
            )
        return tuple(words)


def _first_of(space: Any) -> int:
    """Return the number of the first action of a space."""
    return int(getattr(space, "start", 0))


def last_named(words: Sequence[str], text: str) -> int | None:
    """Return the place in `words` of the one that stands last in `text`; None if none does.

    Capitals and the number of spaces do not count. Of words that begin at the same place, the
    longest counts; a part of a longer word, such as the `left` of `leftmost`, does not.
    """
    known = [_spaced(word) for word in words]
    longest_first = sorted(known, key=len, reverse=True)
    either = "|".join(r"\s+".join(map(re.escape, word.split())) for word in longest_first)
    found = re.findall(rf"(?<![\w-])(?:{either})(?![\w-])", text.lower())
    return known.index(_spaced(found[-1])) if found else None


def _spaced(word: str) -> str:
    return " ".join(word.lower().split())


def uncolored(drawing: str) -> str:
    """Return a drawing without color codes, which often are the only mark of the player.

    Text with a background color is put in brackets, with the color unless it is red; text in a
    color is followed by the color.
    """
    return _CODES.sub("", _COLORED.sub(_described, drawing))


def _described(found: "re.Match[str]") -> str:
    text = found[2]
    for code in map(int, found[1].split(";")):
        if code == 41:
            return f"[{text}]"
        if 40 <= code <= 47:
            return f"[{text} {_COLORS[code - 40]}]"
        if 30 <= code <= 37:
            return f"{text}({_COLORS[code - 30]})"
    return text


class _GymGame:
    def __init__(
        self, made: Any, words: Sequence[str], config: GymConfig, *, is_drawn: bool
    ) -> None:
        self._made = made
        self._numpy: Any = import_module("numpy")  # Gymnasium brings it
        self._words = words
        self._name = config.id
        self._shows_value = config.observation == "value"
        self._is_drawn = is_drawn
        self._asks = config.instruction.replace("{actions}", ", ".join(words)) if words else ""
        self._first = _first_of(made.action_space)

    def reset(self, seed: int) -> str:
        observation, _ = self._made.reset(seed=seed)
        return self._shown(observation)

    def step(self, text: str) -> GameStep:
        action = self._action(text)
        if action is None:
            return GameStep(text=f"That names no action.\n{self._asks}")
        observation, gained, is_over, is_cut, _ = self._made.step(action)
        return GameStep(
            text="" if is_over or is_cut else self._shown(observation),
            reward=as_number(gained, of=f"a step of {self._name}"),
            is_over=bool(is_over),
            is_cut=bool(is_cut),
        )

    def close(self) -> None:
        self._made.close()

    def _shown(self, observation: Any) -> str:
        if self._shows_value:
            # By default, numpy leaves out the middle of arrays with more than 1,000 numbers.
            with self._numpy.printoptions(threshold=sys.maxsize):
                seen = str(observation)
        else:
            drawn = self._made.render() if self._is_drawn else observation
            if not isinstance(drawn, str):
                raise UnplayableError(
                    f"{self._name}: {'render()' if self._is_drawn else 'the observation'} must be "
                    f"text, got {drawn!r:.80}; mend the environment, or set env.observation to "
                    "value, which shows the numbers of its observations"
                )
            seen = uncolored(drawn) if self._is_drawn else drawn
        return f"{seen.strip(chr(10))}\n{self._asks}".strip("\n")

    def _action(self, text: str) -> "int | str | None":
        """Return the action that the last action word in `text` names."""
        if not self._words:
            return text
        place = last_named(self._words, text)
        return None if place is None else self._first + place
