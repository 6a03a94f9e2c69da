"""Games of TextArena, for one player or several: `textarena:ID`.

Of the wrappers around a game, those of its actions are used, such as one that adds missing
brackets. Those of its observations are not: they repeat the whole history in each.
"""

import random
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from telescope_adapters.frameworks import TEXTARENA, imported
from telescope_adapters.games import (
    GameEnvironment,
    GameStep,
    OnePlayer,
    PlayersConfig,
    SeveralPlayers,
    seeds,
)
from telescope_adapters.settings import as_metrics, as_number, told_of_options
from telescope_core.base.errors import EnvironmentLoadError, RewardError, unknown_name
from telescope_core.base.types import Split
from telescope_core.examples import GeneratedSource
from telescope_core.models.matches import Match

_DRAWING = threading.Lock()
"""Held while a game may draw: all games of a process use the same random numbers."""
_Format = Callable[[str], str]
"""What a wrapper makes of an action."""


class ArenaConfig(PlayersConfig):
    """Settings of a TextArena game."""

    reward_min: float = -1.0
    """Smallest reward of a rollout; a smaller one is an error."""


class ArenaMatch(SeveralPlayers):
    """A TextArena game for several players."""

    Config = ArenaConfig

    def __init__(self, config: ArenaConfig) -> None:
        super().__init__(config)
        self.arena = Arena(config)

    def examples(self, split: Split) -> GeneratedSource:
        """Return one example for each seed."""
        return seeds(split)

    async def play_match(self, match: Match) -> dict[str, float]:
        """Let the players answer in turn; a game that a limit ended is a draw."""
        threads = self.caller.in_thread
        game = await threads(self.arena.new_game)
        try:
            reset: Any = match.example.info["reset"]
            seen = await threads(partial(game.reset, reset["seed"]))
            for _ in range(self.config.max_turns):
                said = await match[f"player-{game.player}"].ask(seen)
                step = await threads(partial(game.step, said))
                if step.is_over:
                    match.episode.metrics.update(step.metrics)
                    match.episode.tags.update(step.tags)
                    return {f"player-{who}": reward for who, reward in game.rewards.items()}
                seen = step.text
            match.episode.tags["reason"] = f"env.max_turns = {self.config.max_turns}"
            return dict.fromkeys(self.seats, 0.0)
        finally:
            await threads(game.close)


class ArenaEnvironment(OnePlayer, GameEnvironment):
    """A TextArena game for one player; a game for several is an `ArenaMatch`."""

    Config = ArenaConfig
    several = ArenaMatch

    def __init__(self, config: ArenaConfig | None = None) -> None:
        super().__init__(config)
        self.arena = Arena(self.config)

    def new_game(self) -> "_ArenaGame":
        """Return a game that has not begun."""
        return self.arena.new_game()


class Arena:
    """Creates the games of TextArena that the settings name."""

    def __init__(self, config: ArenaConfig) -> None:
        """Raises EnvironmentLoadError for an unknown game, or an impossible number of players."""
        self._config = config
        self._arena = imported(TEXTARENA, "textarena")
        self._core: Any = imported(TEXTARENA, "textarena.core")
        registry = imported(TEXTARENA, "textarena.envs.registration").ENV_REGISTRY
        name = config.id
        if name not in registry:
            raise unknown_name("TextArena game", name, registry)
        game = self.new_game()
        try:
            game.reset(0)
            if game.num_seated not in (None, config.players):  # it ignores what it is given
                raise AssertionError(f"it has {game.num_seated} players")
        except AssertionError as error:
            raise EnvironmentLoadError(
                f"{name} cannot be begun with env.players = {config.players} ({error}); set it to "
                "a number of players that the game is for (with `telescope env link`, --settings "
                "'{\"players\": 2}')"
            ) from error

    def new_game(self) -> "_ArenaGame":
        """Return a game that has not started."""
        return _ArenaGame(self._make, self._config.players)

    def _make(self) -> tuple[Any, list[_Format]]:
        """Return the game itself, and what its wrappers make of an action, outermost first."""
        with told_of_options(self._config.id):
            game = self._arena.make(self._config.id, **deepcopy(self._config.options))
        formats: list[_Format] = []
        while isinstance(game, self._core.Wrapper):
            if isinstance(game, self._core.ActionWrapper):
                formats.append(game.action)
            game = game.env
        return game, formats


class _ArenaGame:
    def __init__(self, make: Callable[[], tuple[Any, list[_Format]]], num_players: int) -> None:
        self._make = make
        self._num_players = num_players
        self._made: Any = None
        self._formats: list[_Format] = []
        self._is_over = False
        self._numbers: Any = None
        self.player = 0
        """Number of the player whose move it is."""
        self.rewards: dict[int, float] = {}
        """Reward of each player, once the game is over."""

    def reset(self, seed: int) -> str:
        with self._drawing(random.Random(seed).getstate()):
            self._made, self._formats = self._make()
            self._made.reset(num_players=self._num_players, seed=seed)
            return self._seen()

    @property
    def num_seated(self) -> int | None:
        """Number of players whom the game itself counts; None if it does not."""
        return getattr(getattr(self._made, "state", None), "num_players", None)

    def _seen(self) -> str:
        """Return new text for the player whose move it is, without that player's own moves.

        Where several play, it says who each part is from, as TextArena's own observations do.
        """
        self.player, news = self._made.get_observation()
        lines: list[str] = []
        for sender, text, kind in news:
            if not isinstance(text, str):
                # Some games give State.add_observation player and move in the wrong places.
                sender, text = text, kind
            if sender != self.player:
                name = f"[{self._name_of(sender)}] " if self._num_players > 1 else ""
                lines.append(f"{name}{text}")
        return "\n".join(lines)

    def _name_of(self, sender: int) -> str:
        if sender < 0:
            return "GAME"
        state = getattr(self._made, "state", None)
        roles: Mapping[int, object] = getattr(state, "role_mapping", None) or {}
        return str(roles.get(sender, f"Player {sender}"))

    @contextmanager
    def _drawing(self, numbers: Any) -> Generator[None]:
        """Draw from `numbers` in the block, and keep their state for the next one."""
        with _DRAWING:
            before = random.getstate()
            random.setstate(numbers)
            try:
                yield
            finally:
                self._numbers = random.getstate()
                random.setstate(before)

    def step(self, text: str) -> GameStep:
        for formatted in self._formats:
            text = formatted(text)
        with self._drawing(self._numbers):
            is_over, _ = self._made.step(action=text)
            if not is_over:
                return GameStep(text=self._seen())
        rewards, about = self._made.close()
        self._is_over = True
        players = range(self._num_players)
        if rewards is None or {*rewards} != {*players}:
            raise RewardError(
                f"the game ended without a reward for each of its {self._num_players} players, and "
                f"for nobody else: got {rewards!r}"
            )
        self.rewards = {
            player: as_number(rewards[player], of=f"the game, for player {player},")
            for player in players
        }
        metrics: dict[str, float] = {}
        tags: dict[str, str] = {}
        for player in players:
            prefix = f"player-{player}/" if self._num_players > 1 else ""
            facts = {f"{prefix}{key}": value for key, value in about.get(player, {}).items()}
            metrics |= as_metrics(facts, of="the game")
            if f"{prefix}reason" in facts:
                tags[f"{prefix}reason"] = str(facts[f"{prefix}reason"])
        return GameStep(
            text="",
            reward=self.rewards[0],
            is_over=True,
            metrics=metrics,
            tags=tags,
        )

    def close(self) -> None:
        if self._made is not None and not self._is_over:
            self._made.close()
