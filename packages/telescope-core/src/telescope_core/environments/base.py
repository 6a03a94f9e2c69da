"""`Environment`: what an author subclasses, and `EnvironmentConfig`, its typed settings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from telescope_core.environments.episode import Episode
from telescope_core.environments.rewards import (
    ScoreFunction,
    as_number,
    evaluate,
    score_functions,
)
from telescope_core.errors import ConfigError, EnvironmentLoadError, RewardError, unknown_name
from telescope_core.protocols import ExampleSource
from telescope_core.types import Example, Message, Rollout, Split, StopReason


class EnvironmentConfig(BaseModel):
    """Settings of one environment; each field of a subclass becomes a `--env.field` flag."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Environment:
    """A source of examples, a way to play them, and rewards.

    Subclass `SingleTurnEnvironment`, `MultiTurnEnvironment` or `ToolEnvironment`, or this class
    and override `play` for full control. One instance serves many rollouts at once: keep the
    state of a rollout in its `Episode`, never on `self`.
    """

    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    reward_min: ClassVar[float] = 0.0
    reward_max: ClassVar[float] = 1.0
    success_threshold: ClassVar[float] = 1.0
    """A rollout with at least this reward counts as solved in pass@k."""
    network: Literal["none", "load", "always"] = "none"
    secrets: ClassVar[tuple[str, ...]] = ()
    system_prompt: str = ""
    score_functions: ClassVar[tuple[ScoreFunction, ...]] = ()

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        self.config: Any = config if config is not None else self.Config()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.score_functions = score_functions(cls)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "Environment":
        """Build it from plain settings; an unknown or bad one is a ConfigError."""
        for key in settings:
            if key not in cls.Config.model_fields:
                raise unknown_name(f"setting of {cls.__name__}", key, cls.Config.model_fields)
        try:
            return cls(cls.Config(**settings))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in ("env", *first["loc"]))
            raise ConfigError(
                f"{cls.__name__}: {field}: {first['msg']}, got {first['input']!r}"
            ) from None

    def examples(self, split: Split) -> ExampleSource:
        """Return the examples of `split`; ids are stable and the splits disjoint."""
        raise EnvironmentLoadError(f"{type(self).__name__} must define examples(self, split)")

    def splits(self) -> tuple[Split, ...]:
        """Return the splits it has."""
        return (Split.TRAIN, Split.EVAL)

    def dataset_revisions(self) -> dict[str, str]:
        """Return dataset -> pinned revision, for every dataset it loads."""
        return {}

    def format_prompt(self, example: Example) -> str | Sequence[Message]:
        """Return what the policy is asked; text becomes one user message."""
        return example.prompt

    def gold_answer(self, example: Example) -> str | None:
        """Return a completion that earns the maximum; None when there is no such text."""
        return None

    def initial_messages(self, example: Example) -> list[Message]:
        """Return the system prompt, if any, and the formatted prompt."""
        prompt = self.format_prompt(example)
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else [*prompt]
        if self.system_prompt:
            messages.insert(0, Message(role="system", content=self.system_prompt))
        return messages

    async def play(self, episode: Episode) -> StopReason:
        """Run one rollout by calling `episode.generate` and `episode.add`."""
        raise EnvironmentLoadError(
            f"{type(self).__name__} must subclass SingleTurnEnvironment, MultiTurnEnvironment "
            "or ToolEnvironment, or define async play(self, episode)"
        )

    async def close(self) -> None:
        """Release what it holds beyond a rollout, such as connections. Idempotent."""

    async def compute_reward(self, rollout: Rollout, example: Example) -> float:
        """Return the reward: by default the weighted sum of the `@reward` methods."""
        weights = {function.name: function.weight for function in self.score_functions}
        return sum(weights[name] * value for name, value in rollout.rewards.items())

    async def score(
        self, rollout: Rollout, example: Example
    ) -> tuple[float, dict[str, float], dict[str, float]]:
        """Return (reward, rewards by name, metrics by name) of a finished rollout."""
        rewards = await evaluate(self.score_functions, "reward", self, rollout, example)
        metrics = await evaluate(self.score_functions, "metric", self, rollout, example)
        scored = replace(rollout, rewards=rewards, metrics={**rollout.metrics, **metrics})
        total = as_number(
            await self.compute_reward(scored, example),
            what=f"{type(self).__name__}.compute_reward",
        )
        self.check_range(total)
        return total, rewards, dict(scored.metrics)

    def check_range(self, total: float) -> None:
        """Raise RewardError when `total` is outside the declared range."""
        slack = 1e-6 * max(1.0, abs(self.reward_min), abs(self.reward_max))
        if not self.reward_min - slack <= total <= self.reward_max + slack:
            raise RewardError(
                f"{type(self).__name__} returned reward {total:g}, outside its declared range "
                f"[{self.reward_min:g}, {self.reward_max:g}]; "
                "correct the reward, or reward_min and reward_max"
            )
