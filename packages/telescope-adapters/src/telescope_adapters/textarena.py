"""Games of TextArena, for one player or several: `textarena:ID`.

The `-raw` form of a game is used, whose observations hold only new text; the usual form repeats the
whole history in each.
"""

import random
import threading
from collections.abc import Callable, Generator
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
from telescope_adapters.settings import as_metrics, as_number
from telescope_core.base.errors import EnvironmentLoadError, RewardError, unknown_name
from telescope_core.base.types import Split
from telescope_core.examples import GeneratedSource
from telescope_core.models.matches import Match

_DRAWING = threading.Lock()
"""Held while a game may draw: all games of a process use the same random numbers."""


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
        registry = imported(TEXTARENA, "textarena.envs.registration").ENV_REGISTRY
        name = config.id
        if name not in registry:
            raise unknown_name("TextArena game", name, registry)
        self._raw = name if name.endswith("-raw") else f"{name}-raw"
        if self._raw not in registry:
            raise EnvironmentLoadError(
                f"{name} has no form {self._raw}, without which each observation repeats the whole "
                "history; choose a game that has one"
            )
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
        config = self._config
        return _ArenaGame(
            lambda: self._arena.make(self._raw, **deepcopy(config.options)), config.players
        )


class _ArenaGame:
    def __init__(self, make: Callable[[], Any], num_players: int) -> None:
        self._make = make
        self._num_players = num_players
        self._made: Any = None
        self._is_over = False
        self._numbers: Any = None
        self.player = 0
        """Number of the player whose move it is."""
        self.rewards: dict[int, float] = {}
        """Reward of each player, once the game is over."""

    def reset(self, seed: int) -> str:
        with self._drawing(random.Random(seed).getstate()):
            self._made = self._make()
            self._made.reset(num_players=self._num_players, seed=seed)
            return self._seen()

    @property
    def num_seated(self) -> int | None:
        """Number of players whom the game itself counts; None if it does not."""
        return getattr(getattr(self._made, "state", None), "num_players", None)

    def _seen(self) -> str:
        """Return new text for the player whose move it is, without that player's own moves."""
        self.player, news = self._made.get_observation()
        lines: list[str] = []
        for sender, text, kind in news:
            if not isinstance(text, str):
                # Some games give State.add_observation player and move in the wrong places.
                sender, text = text, kind
            if sender != self.player:
                lines.append(str(text))
        return "\n".join(lines)

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
