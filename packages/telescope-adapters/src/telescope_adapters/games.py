"""Games that are stepped: the player sees text, and each answer is one move.

Shared by the adapters of Gymnasium and TextArena. An example is a seed: train has the odd ones,
eval the even ones. Each rollout has a game of its own, which is stepped in threads.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from telescope_adapters.settings import AdaptedConfig, Earned, SteppedEnvironment
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.types import Example, Split, StopReason
from telescope_core.environments import Episode
from telescope_core.examples import GeneratedSource


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

    max_turns: int = 30
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
                episode.state.add(step.reward)
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
