"""Settings and declarations that every adapter shares.

Other frameworks declare no range of rewards, so the range is a setting here, and it is strict: the
first reward outside it ends the eval or the run, and the error says which setting to change.
"""

import inspect
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field

from telescope_core.base.code_places import raised_at
from telescope_core.base.errors import (
    ConfigError,
    EnvironmentLoadError,
    RewardError,
    TelescopeError,
    UnplayableError,
    nearest,
)
from telescope_core.base.secret_names import link_advice
from telescope_core.base.types import Example, JsonValue, Message
from telescope_core.environments import Environment, EnvironmentConfig, Episode, reward
from telescope_core.environments.outcomes import finite


class AdaptedConfig(EnvironmentConfig):
    """Settings of an environment of another framework."""

    id: str
    """Name of the environment in the framework; set by `telescope env link SCHEME:ID`."""
    options: dict[str, Any] = Field(default={})
    """Arguments with which the framework makes it, by name."""
    reward_min: float = 0.0
    """Smallest reward of a rollout; a smaller one is an error."""
    reward_max: float = 1.0
    """Largest reward of a rollout; a larger one is an error."""
    success_threshold: float | None = None
    """A rollout with at least this reward counts as solved; None = `reward_max`."""


class AdaptedEnvironment(Environment):
    """An environment of another framework: its range of rewards is a setting."""

    Config = AdaptedConfig
    needs_answer = False

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        settings: AdaptedConfig = self.config
        if settings.reward_min >= settings.reward_max:
            raise ConfigError(
                f"env.reward_min must be smaller than env.reward_max, got {settings.reward_min:g} "
                f"and {settings.reward_max:g}"
            )
        threshold = settings.success_threshold
        # Class variables for authors; here each instance has its own.
        vars(self).update(
            reward_min=settings.reward_min,
            reward_max=settings.reward_max,
            success_threshold=settings.reward_max if threshold is None else threshold,
        )

    def check_range(self, total: float) -> None:
        """Raise UnplayableError if `total` is outside the range, which the user must set."""
        try:
            super().check_range(total)
        except UnplayableError as error:
            raise UnplayableError(
                self.range_advice(f"{self.config.id} gave a reward of {total:g}")
            ) from error

    def range_advice(self, found: str) -> str:
        """Return the setting to change for the reward outside the range in `found`."""
        settings: AdaptedConfig = self.config
        return (
            f"{found}, outside its declared range [{settings.reward_min:g}, "
            f"{settings.reward_max:g}]; set env.reward_min and env.reward_max to the smallest and "
            "the largest reward that it can give (--env.reward_min -1, for example; with "
            "`telescope env link`, --settings '{\"reward_min\": -1}')"
        )

    async def first_messages(self, example: Example) -> list[Message]:
        """Return nothing: the framework decides how a rollout begins."""
        return []


@dataclass(slots=True)
class Earned:
    """The sum of the rewards of one rollout so far."""

    total: float | None = None
    """None until a step gives one."""

    def add(self, gained: object, *, of: str) -> None:
        """Count the reward of a step of the environment `of`, if it has one."""
        if gained is not None:
            self.total = (self.total or 0.0) + as_number(gained, of=f"a step of {of}")


class SteppedEnvironment(AdaptedEnvironment):
    """An environment whose reward is the sum of those of its steps."""

    State: ClassVar[type[Earned]] = Earned

    @reward
    def total(self, episode: Episode[Earned]) -> float:
        """The sum of the rewards of all steps; 0 if the policy ended before there was one."""
        return episode.state.total or 0.0


def note_place(error: Exception, module: str) -> None:
    """Note on `error`, of code that a framework called, where it was raised, and a key it lacks.

    `module` is the author's. Errors of ours, such as those of the policy, say it themselves.
    """
    if not isinstance(error, TelescopeError):
        advice = link_advice(str(error), os.environ)
        error.add_note(f"{raised_at(error, module).strip(' ()')}{advice}")


def set_option(name: str) -> str:
    """Return how to set the argument `name` with which the framework makes the environment."""
    shown = f'{{"{name}": VALUE}}'
    return (
        f"set it in env.options (--env.options '{shown}'; with `telescope env link`, --settings "
        f"'{{\"options\": {shown}}}')"
    )


def require_options(made_by: Callable[..., Any], options: Mapping[str, Any], *, of: str) -> None:
    """Raise ConfigError unless `made_by`, which `of` names, can be called with `options`."""
    signature = inspect.signature(made_by)
    try:
        signature.bind(**options)
    except TypeError as error:
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = [one for one in signature.parameters.values() if one.kind in by_name]
        names = [one.name for one in takes]
        missing = [
            one.name for one in takes if one.default is one.empty and one.name not in options
        ]
        unknown = [name for name in options if name not in names]
        close = [near for name in unknown for near in nearest(name, names)[:1]]
        meant = f"did you mean {close[0]!r}? " if close else ""
        advice = set_option((missing or close)[0]) if missing or close else "correct env.options"
        raise ConfigError(
            f"{of}: {error}; {meant}it takes {', '.join(names) or 'no arguments'}; {advice}"
        ) from error


@contextmanager
def told_of_example(name: str, *, of: str) -> Generator[None]:
    """Name the example, and the environment that it is of, in an EnvironmentLoadError."""
    try:
        yield
    except EnvironmentLoadError as error:
        raise EnvironmentLoadError(f"{of}, example {name}: {error}") from error


@contextmanager
def told_of_options(of: str) -> Generator[None]:
    """Raise ConfigError where a call in the block lacks an argument, or is given a wrong one.

    The block makes `of`, whose class takes the options as arguments.
    """
    try:
        yield
    except TypeError as error:
        found = re.search(r"(missing|unexpected) .*argument[^']*'(\w+)'", str(error))
        if found is None:
            raise
        kind, name = found.groups()
        advice = set_option(name) if kind == "missing" else "correct env.options"
        raise ConfigError(f"{of} cannot be made: {error}; {advice}") from error


def as_number(value: object, *, of: str) -> float:
    """Return what `of` gave as reward or metric; raises RewardError if it is no finite number."""
    number = finite(value)
    if number is None:
        raise RewardError(f"{of} gave {value!r:.80}, expected a finite number")
    return number


def as_metrics(values: Mapping[str, object], *, of: str, kind: str = "metric") -> dict[str, float]:
    """Return the numbers in `values`, including those of other libraries; others are left out.

    Raises RewardError for one that is not finite, which names it as a `kind` of `of`.
    """
    return {
        name: as_number(value, of=f"{kind} {name} of {of}")
        for name, value in values.items()
        if isinstance(value, int | float)
    }


def function_tool(name: str, description: str, schema: object) -> dict[str, JsonValue]:
    """Return a tool in OpenAI form."""
    parameters: Any = schema or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
