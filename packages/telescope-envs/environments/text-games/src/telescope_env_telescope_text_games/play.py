"""`SeededGame`: one game of TextArena whose chance depends on its seed alone.

TextArena draws from Python's and numpy's global generators. Each call to a game therefore runs with
the state that this game left there, one call at a time.
"""

import importlib
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from telescope_env_telescope_text_games.names import players_of

_ONE_AT_A_TIME = threading.Lock()
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a game ended."""

    scores: tuple[float, ...]
    """What each player got, as the game says: 0 to 1 in a game for one, -1 to 1 in a match."""
    broke_rules: tuple[bool, ...]
    """Whether it ended because moves of this player broke its rules."""


class SeededGame:
    """One game in progress; its methods block, and may be called from any thread."""

    def __init__(self, name: str, seed: int) -> None:
        self._chance: tuple[object, ...] = ()
        self._seed = seed
        self._num_players = players_of(name)
        self.player = 0
        """Whose move it is, as of the last call of `told`."""
        self._game: Any = self._call(lambda: self._started(name))

    def told(self) -> str:
        """Return what is new to the player whose move it is, without that player's own moves."""
        seen: Sequence[tuple[int, str, object]]
        self.player, seen = self._call(lambda: self._game.get_observation())
        return "\n\n".join(str(text).strip() for source, text, _ in seen if source != self.player)

    def move(self, text: str) -> Outcome | None:
        """Make a move; returns how the game ended, or None while it goes on."""
        done: object = self._call(lambda: self._game.step(action=text)[0])
        if not done:
            return None
        ended: Any = self._call(lambda: self._game.close())
        scores, about = ended
        players = range(self._num_players)
        return Outcome(
            scores=tuple(float(scores[one]) if scores else 0.0 for one in players),
            broke_rules=tuple(bool(about[one]["invalid_move"]) for one in players),
        )

    @property
    def state(self) -> dict[str, Any]:
        """What the game keeps hidden."""
        return cast(dict[str, Any], self._game.state.game_state)

    def _started(self, name: str) -> Any:
        # Imported with the first game, because it takes seconds.
        game: Any = cast(Any, importlib.import_module("textarena")).make(f"{name}-v0-raw")
        if "numpy" in sys.modules:
            cast(Any, sys.modules["numpy"]).random.seed(self._seed % 2**32)
        random.seed(self._seed)
        game.reset(num_players=self._num_players, seed=self._seed)
        if self._num_players == 1:
            game.state.set_invalid_move = _in_order(game.state.set_invalid_move)
        return game

    def _call(self, function: Callable[[], Result]) -> Result:
        with _ONE_AT_A_TIME:
            outside = _chance()
            if self._chance:
                _set_chance(self._chance)
            try:
                return function()
            finally:
                self._chance = _chance()
                _set_chance(outside)


def _in_order(set_invalid_move: Callable[[str, float], None]) -> Callable[..., None]:
    """Return `set_invalid_move` for games that give it the score first and the reason second."""

    def in_order(reason: str | float, reward: str | float = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        set_invalid_move(str(reason), float(reward))

    return in_order


def _chance() -> tuple[object, ...]:
    """Return the states of the global generators: Python's, and numpy's once it is imported."""
    numpy: Any = sys.modules.get("numpy")
    own = (random.getstate(),)
    return own if numpy is None else (*own, numpy.random.get_state())


def _set_chance(states: tuple[object, ...]) -> None:
    random.setstate(cast(tuple[Any, ...], states[0]))
    if len(states) > 1:
        cast(Any, sys.modules["numpy"]).random.set_state(states[1])
