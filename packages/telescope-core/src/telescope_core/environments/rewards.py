"""Decorators that turn methods into rewards and metrics, and the code that runs them.

A reward or metric returns a number, and a group reward a list with one number per rollout. Each
argument is chosen by the name of the parameter, which may begin with an underscore to say that the
method does not use the value.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, overload

from telescope_core.base.code_places import location_of, require_known, require_method
from telescope_core.base.errors import EnvironmentLoadError, RewardError, nearest
from telescope_core.base.types import Example, MetricRange, Rollout
from telescope_core.environments.calls import Caller, MethodCall
from telescope_core.environments.calls import call as call
from telescope_core.environments.episode import Episode
from telescope_core.environments.hooks import marked, require_first
from telescope_core.environments.outcomes import finite

_VALUES: Mapping[str, Callable[[Rollout, Example, Episode[Any]], object]] = {
    "rollout": lambda rollout, example, episode: rollout,
    "example": lambda rollout, example, episode: example,
    "episode": lambda rollout, example, episode: episode,
    "completion": lambda rollout, example, episode: rollout.completion_text,
    "messages": lambda rollout, example, episode: rollout.messages,
    "prompt": lambda rollout, example, episode: example.prompt,
    "answer": lambda rollout, example, episode: example.answer,
    "info": lambda rollout, example, episode: example.info,
    "state": lambda rollout, example, episode: episode.state,
}
_GROUP_VALUES: Mapping[str, Callable[[Sequence[Rollout], Example], object]] = {
    "rollouts": lambda rollouts, example: rollouts,
    "example": lambda rollouts, example: example,
    "completions": lambda rollouts, example: [one.completion_text for one in rollouts],
    "prompt": lambda rollouts, example: example.prompt,
    "answer": lambda rollouts, example: example.answer,
    "info": lambda rollouts, example: example.info,
}
OF_EPISODE = frozenset({"episode", "state"})
"""Names of values that exist only in the process that plays the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a method, as its class wrote them."""

    names: tuple[str, ...] = ()
    """Names of the values, in the order of the parameters."""
    problem: str = ""
    """Why the method cannot be called, and what to do; empty if it can."""


def parameters_of(method: Callable[..., Any], *, of_group: bool) -> Parameters:
    """Return the parameters of a method after `self`, as it is written in its class."""
    known = _GROUP_VALUES if of_group else _VALUES
    parameters = list(inspect.signature(method).parameters.values())
    first = parameters[0].name if parameters else ""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not parameters or first.lstrip("_") in known or parameters[0].kind in stars:
        return Parameters(problem="must have self as its first parameter")
    names: list[str] = []
    for parameter in parameters[1:]:
        plain = parameter.name.lstrip("_")
        if plain not in known or parameter.kind in stars:
            close = nearest(parameter.name, known)
            meant = f"did you mean {close[0]!r}? The" if close else "the"
            is_constant = parameter.default is not parameter.empty
            why = ", so that it would always have its default" if is_constant else ""
            name = str(parameter).partition(":")[0] if parameter.kind in stars else parameter.name
            return Parameters(
                problem=f"has a parameter {name!r}, which stands for nothing{why}; {meant} names "
                f"are {', '.join(known)}"
            )
        if parameter.kind is parameter.KEYWORD_ONLY:
            return Parameters(
                problem=f"must take {parameter.name!r} by position; remove the * before it"
            )
        names.append(plain)
    return Parameters(names=tuple(names))


def values_for(
    names: Sequence[str], *, rollout: Rollout, example: Example, episode: Episode[Any]
) -> tuple[object, ...]:
    """Return the arguments of a reward or metric."""
    return tuple(_VALUES[name](rollout, example, episode) for name in names)


def group_values_for(
    names: Sequence[str], *, rollouts: Sequence[Rollout], example: Example
) -> tuple[object, ...]:
    """Return the arguments of a group reward."""
    return tuple(_GROUP_VALUES[name](rollouts, example) for name in names)


Method = TypeVar("Method", bound=Callable[..., Any])
Kind = Literal["reward", "metric", "group_reward"]
_MARK = "__telescope_score__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFunction:
    """One decorated method of an environment class."""

    name: str
    kind: Kind
    weight: float = 0.0
    """Factor in the sum of rewards."""
    range: MetricRange = field(default_factory=MetricRange)
    """Limits and direction of a metric."""
    parameters: Parameters = field(default_factory=Parameters)
    reads_answer: bool = False
    """Whether it has the parameter `answer`, or its code reads an attribute or global of that
    name."""


def _mark(function: Method, kind: Kind, **more: Any) -> Method:
    require_method(function, f"@{kind}")
    other = getattr(function, _MARK, None)
    if other is not None:
        raise EnvironmentLoadError(
            f"{location_of(function)} is marked with @{other.kind} and @{kind}; keep one of them"
        )
    require_first(function, kind)
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = code.co_names if code is not None else ()
    parameters = parameters_of(function, of_group=kind == "group_reward")
    score = ScoreFunction(
        name=function.__name__,
        kind=kind,
        parameters=parameters,
        reads_answer="answer" in (*names, *parameters.names),
        **more,
    )
    setattr(function, _MARK, score)
    return function


@overload
def reward(function: Method, /) -> Method: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...
def reward(
    function: Method | None = None, /, *more: object, weight: float = 1.0, **unknown: object
) -> Method | Callable[[Method], Method]:
    """Add this method's value, times `weight`, to the rollout's reward."""
    require_known("@reward", more, unknown, ("weight",))
    if function is not None:
        return _mark(function, "reward", weight=weight)
    return lambda inner: _mark(inner, "reward", weight=weight)


@overload
def metric(function: Method, /) -> Method: ...
@overload
def metric(
    *, low: float | None = None, high: float | None = None, lower_is_better: bool = False
) -> Callable[[Method], Method]: ...
def metric(
    function: Method | None = None,
    /,
    *more: object,
    low: float | None = None,
    high: float | None = None,
    lower_is_better: bool = False,
    **unknown: object,
) -> Method | Callable[[Method], Method]:
    """Record this method's value beside the reward, without adding it to the reward.

    A value below `low` or above `high` is an error; None means no limit. `lower_is_better` tells
    reports the direction of the metric.
    """
    require_known("@metric", more, unknown, ("low", "high", "lower_is_better"))
    about = MetricRange(low=low, high=high, lower_is_better=lower_is_better)
    if function is not None:
        return _mark(function, "metric", range=about)
    return lambda inner: _mark(inner, "metric", range=about)


@overload
def group_reward(function: Method, /) -> Method: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...
def group_reward(
    function: Method | None = None, /, *more: object, weight: float = 1.0, **unknown: object
) -> Method | Callable[[Method], Method]:
    """Add this method's value for each rollout of a group, times `weight`, to its reward.

    The method sees all scored rollouts of the group and returns a list of one number for each, in
    the same order.
    """
    require_known("@group_reward", more, unknown, ("weight",))
    if function is not None:
        return _mark(function, "group_reward", weight=weight)
    return lambda inner: _mark(inner, "group_reward", weight=weight)


def score_functions(owner: type) -> tuple[ScoreFunction, ...]:
    """Return the decorated methods of `owner` in source order, those of its bases first."""
    found = marked(owner, _MARK, ScoreFunction)
    return tuple(replace(mark, name=name) for name, mark in found.items())


def as_number(value: object, *, what: Callable[[], str]) -> float:
    """Return `value` as a finite float; otherwise raises RewardError that names `what()`."""
    number = finite(value)
    if number is not None:
        return number
    raise RewardError(
        f"{what()} must return a finite number, got {value!r} ({type(value).__name__}); "
        "return a float, or raise to mark the rollout as failed"
    )


async def evaluate(
    functions: Sequence[ScoreFunction],
    owner: object,
    caller: Caller,
    *,
    rollout: Rollout,
    example: Example,
    episode: Episode[Any],
) -> dict[str, float]:
    """Run `functions`, which are methods of `owner`; returns name -> unweighted value."""
    calls = [
        MethodCall(
            method=getattr(owner, function.name),
            arguments=values_for(
                function.parameters.names, rollout=rollout, example=example, episode=episode
            ),
            what=function.kind,
        )
        for function in functions
    ]
    values = await caller.all(calls)
    return {
        function.name: _checked(function, value, owner)
        for function, value in zip(functions, values, strict=True)
    }


def _checked(function: ScoreFunction, value: object, owner: object) -> float:
    def where() -> str:
        return f"{function.kind} {location_of(getattr(owner, function.name))}"

    number = as_number(value, what=where)
    low, high = function.range.low, function.range.high
    if (low is not None and number < low) or (high is not None and number > high):
        raise RewardError(
            f"{where()} returned {number:g}, outside its declared range {low} to {high} "
            "(None = no limit); correct the value, or low and high"
        )
    return number
