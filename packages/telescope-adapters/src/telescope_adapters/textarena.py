"""One-player games of TextArena: `textarena:ID`.

The `-raw` form of a game is played, whose observations hold only what is new; the usual form
repeats the whole history in each.
"""

import random
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from telescope_adapters.frameworks import TEXTARENA, imported
from telescope_adapters.games import GameConfig, GameEnvironment, GameStep
from telescope_adapters.settings import as_metrics
from telescope_core.base.errors import EnvironmentLoadError, RewardError, unknown_name

_PLAYER = 0
_DRAWING = threading.Lock()
"""Held while a game may draw: all games of a process draw from the same random numbers."""


class ArenaConfig(GameConfig):
    """Settings of a TextArena game."""

    reward_min: float = -1.0
    """Smallest reward of a rollout; a smaller one is an error."""


class ArenaEnvironment(GameEnvironment):
    """A TextArena game for one player."""

    Config = ArenaConfig

    def __init__(self, config: ArenaConfig | None = None) -> None:
        super().__init__(config)
        self.arena = imported(TEXTARENA, "textarena")
        registry = imported(TEXTARENA, "textarena.envs.registration").ENV_REGISTRY
        name = self.config.id
        if name not in registry:
            raise unknown_name("TextArena game", name, registry)
        raw = name if name.endswith("-raw") else f"{name}-raw"
        if raw not in registry:
            raise EnvironmentLoadError(
                f"{name} has no form {raw}, without which each observation repeats the whole "
                "history; choose a game that has one"
            )
        self._raw = raw
        self._require_one_player()

    def new_game(self) -> "_ArenaGame":
        """Return a game that has not begun."""
        return _ArenaGame(lambda: self.arena.make(self._raw, **deepcopy(self.config.options)))

    def _require_one_player(self) -> None:
        try:
            self.new_game().reset(0)
        except AssertionError as error:
            raise EnvironmentLoadError(
                f"{self.config.id} cannot be begun by one player ({error}); this adapter plays "
                "games of one player"
            ) from error


class _ArenaGame:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None
        self._is_over = False
        self._numbers: Any = None

    def reset(self, seed: int) -> str:
        with self._drawing(random.Random(seed).getstate()):
            self._made = self._make()
            self._made.reset(num_players=1, seed=seed)
            return _shown(self._made.get_observation()[1])

    @contextmanager
    def _drawing(self, numbers: Any) -> Generator[None]:
        """Draw from `numbers` in the block, and keep what is left of them for the next one."""
        with _DRAWING:
            before = random.getstate()
            random.setstate(numbers)
            try:
                yield
            finally:
                self._numbers = random.getstate()
                random.setstate(before)

    def step(self, text: str) -> GameStep:
        with self._drawing(self._numbers):
            is_over, _ = self._made.step(action=text)
            if not is_over:
                return GameStep(text=_shown(self._made.get_observation()[1]))
        rewards, about = self._made.close()
        self._is_over = True
        if rewards is None or _PLAYER not in rewards:
            raise RewardError(f"the game ended without a reward for the player, got {rewards!r}")
        facts = {str(key): value for key, value in about.get(_PLAYER, {}).items()}
        return GameStep(
            text="",
            reward=float(rewards[_PLAYER]),
            is_over=True,
            metrics=as_metrics(facts),
            tags={"reason": str(facts["reason"])} if "reason" in facts else {},
        )

    def close(self) -> None:
        if self._made is not None and not self._is_over:
            self._made.close()


def _shown(news: Iterable[tuple[int, str, object]]) -> str:
    """Return what is new, without the player's own move."""
    return "\n".join(text for sender, text, _ in news if sender != _PLAYER)
