"""Decorators that turn methods into rewards and metrics, and the code that runs them.

A reward function takes `(rollout, example)` and returns a number; a group reward takes
`(rollouts, example)` and returns one number per rollout. Sync or async. Sync ones run in a
thread, so a slow one never blocks the event loop.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar, cast, overload

from telescope_core.errors import RewardError

Method = TypeVar("Method", bound=Callable[..., Any])
Kind = Literal["reward", "metric", "group_reward"]
_MARK = "__telescope_score__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFunction:
    """One decorated method of an environment class."""

    name: str
    kind: Kind
    weight: float


def _mark(function: Method, kind: Kind, weight: float) -> Method:
    setattr(function, _MARK, ScoreFunction(name=function.__name__, kind=kind, weight=weight))
    return function


@overload
def reward(function: Method, /) -> Method: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...
def reward(
    function: Method | None = None, /, *, weight: float = 1.0
) -> Method | Callable[[Method], Method]:
    """Count this method, times `weight`, in the reward."""
    if function is not None:
        return _mark(function, "reward", weight)
    return lambda inner: _mark(inner, "reward", weight)


def metric(function: Method, /) -> Method:
    """Record this method's value beside the reward."""
    return _mark(function, "metric", 0.0)


@overload
def group_reward(function: Method, /) -> Method: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[Method], Method]: ...
def group_reward(
    function: Method | None = None, /, *, weight: float = 1.0
) -> Method | Callable[[Method], Method]:
    """Count this method of a whole group, times `weight`, in each rollout's reward."""
    if function is not None:
        return _mark(function, "group_reward", weight)
    return lambda inner: _mark(inner, "group_reward", weight)


def score_functions(owner: type) -> tuple[ScoreFunction, ...]:
    """Return the decorated methods of `owner`, those of its bases first, in source order."""
    found: dict[str, ScoreFunction] = {}
    for cls in reversed(owner.__mro__):
        for name, member in vars(cls).items():
            mark = getattr(member, _MARK, None)
            if isinstance(mark, ScoreFunction):
                found[name] = mark
            else:
                found.pop(name, None)
    return tuple(found.values())


async def call(function: Callable[..., Any], *arguments: object) -> object:
    """Call a sync or async function; a sync one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await cast(Awaitable[object], function(*arguments))
    return await asyncio.to_thread(function, *arguments)


def as_number(value: object, *, what: str) -> float:
    """Return `value` as a finite float; raises RewardError naming `what` otherwise."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise RewardError(
        f"{what} must return a finite number, got {value!r} ({type(value).__name__}); "
        "return a float, or raise to mark the rollout as failed"
    )


async def evaluate(
    functions: Sequence[ScoreFunction], kind: Kind, owner: object, *arguments: object
) -> dict[str, float]:
    """Run all functions of `kind` on `owner`; returns name -> value, unweighted."""
    chosen = [function for function in functions if function.kind == kind]
    methods = [getattr(owner, function.name) for function in chosen]
    values = await _call_all(methods, *arguments)
    return {
        function.name: as_number(value, what=f"{kind} {type(owner).__name__}.{function.name}")
        for function, value in zip(chosen, values, strict=True)
    }


async def _call_all(functions: Sequence[Callable[..., Any]], *arguments: object) -> list[object]:
    """Call all in order; neighbours that are sync share one trip to a thread."""
    values: list[object] = []
    for is_async, run in groupby(functions, key=inspect.iscoroutinefunction):
        if is_async:
            values += [await call(function, *arguments) for function in run]
        else:
            values += await asyncio.to_thread(_call_in_order, tuple(run), arguments)
    return values


def _call_in_order(
    functions: Sequence[Callable[..., Any]], arguments: tuple[object, ...]
) -> list[object]:
    return [function(*arguments) for function in functions]
