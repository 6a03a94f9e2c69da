"""Games that are stepped: the player sees text, and each answer is one move.

Shared by the adapters of Gymnasium and TextArena, and, what several players need, by that of
OpenEnv. An example is a seed: train has the odd ones, eval the even ones. Each rollout has a game
of its own, which is stepped in threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field

from telescope_adapters.settings import (
    AdaptedConfig,
    AdaptedEnvironment,
    Earned,
    SteppedEnvironment,
)
from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_core.base.types import Example, Split, StopReason
from telescope_core.environments import Environment, Episode
from telescope_core.environments.building import class_location
from telescope_core.environments.settings import read_settings
from telescope_core.examples import GeneratedSource
from telescope_core.models.matches import MAX_SEATS, MatchConfig, MatchEnvironment


@dataclass(frozen=True, slots=True, kw_only=True)
class GameStep:
    """The response of a game to one move."""

    text: str
    """The next text for the player."""
    reward: float = 0.0
    is_over: bool = False
    """Whether the game has ended."""
    is_cut: bool = False
    """Whether a limit of the game ended it."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    tags: dict[str, str] = field(default_factory=dict[str, str])


class Game(Protocol):
    """One game in progress; its methods may block."""

    def reset(self, seed: int) -> str:
        """Start the game, and return the first text for the player."""
        ...

    def step(self, text: str) -> GameStep:
        """Make the move in an answer."""
        ...

    def close(self) -> None:
        """Release the resources of the game."""
        ...


class GameConfig(AdaptedConfig):
    """Settings of a game."""

    max_turns: int = Field(default=30, ge=1)
    """Most moves of a rollout."""


class GameEnvironment(SteppedEnvironment):
    """A game whose reward is the sum of those of its steps."""

    Config = GameConfig

    def new_game(self) -> Game:
        """Return a game that has not started; called in a thread."""
        raise EnvironmentLoadError(f"{type(self).__name__} must define new_game(self)")

    def examples(self, split: Split) -> GeneratedSource:
        """Return one example for each seed."""
        return seeds(split)

    async def play(self, episode: Episode[Earned]) -> StopReason:
        """Answer each text until the game is over."""
        threads = self.caller.in_thread
        game = await threads(self.new_game)
        try:
            reset: Any = episode.example.info["reset"]
            seen = await threads(partial(game.reset, reset["seed"]))
            for _ in range(self.config.max_turns):
                episode.add(seen)
                said = await episode.generate()
                if said.finish_reason == "length":
                    return StopReason.LENGTH
                step = await threads(partial(game.step, said.message.content))
                episode.state.add(step.reward, of=self.config.id)
                episode.metrics.update(step.metrics)
                episode.tags.update(step.tags)
                if step.is_over or step.is_cut:
                    return StopReason.COMPLETED if step.is_over else StopReason.MAX_TURNS
                seen = step.text
            return StopReason.MAX_TURNS
        finally:
            await threads(game.close)


def seeds(split: Split) -> GeneratedSource:
    """Return one example for each seed of a split."""

    def seeded(_: object, index: int) -> Example:
        seed = 2 * index + (split is Split.TRAIN)
        return Example(id=f"seed-{seed}", prompt=f"seed {seed}", info={"reset": {"seed": seed}})

    return GeneratedSource(seeded, seed=0)


class PlayersConfig(GameConfig, MatchConfig):
    """Settings of a game that may be for several players."""

    players: Annotated[int, Field(ge=1, le=MAX_SEATS)] = 1
    """Players of the game, or those that its server was started for. With 2 and more it is a match,
    of which `player-0` is the first seat."""


class OnePlayer(SteppedEnvironment):
    """A game for one player; with more of them in its settings, its `several` is built."""

    several: ClassVar[type["SeveralPlayers"]]

    def __init__(self, config: PlayersConfig | None = None) -> None:
        super().__init__(config)
        if self.config.opponents:
            raise ConfigError(
                f"{self.config.id} has env.opponents but one player; set env.players to 2 or more"
            )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Environment:
        """Build the environment for the number of players in the settings."""
        config = read_settings(cls.Config, settings, owner=class_location(cls))
        if isinstance(config, PlayersConfig) and config.players > 1:
            return cls.several.from_settings(settings)
        return super().from_settings(settings)


class SeveralPlayers(AdaptedEnvironment, MatchEnvironment):
    """A game for several players, each of which is a seat."""

    def __init__(self, config: PlayersConfig) -> None:
        vars(self).update(seats=tuple(f"player-{number}" for number in range(config.players)))
        super().__init__(config)
