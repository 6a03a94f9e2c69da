"""Pass rewards and metrics their arguments, each chosen by the name of the parameter.

A name may begin with an underscore, which says that the method does not use the value.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telescope_core.base.errors import nearest
from telescope_core.base.types import Example, Rollout
from telescope_core.environments.episode import Episode

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
    if not parameters or first.lstrip("_") in known:
        return Parameters(problem="must have self as its first parameter")
    names: list[str] = []
    for position, parameter in enumerate(parameters[1:]):
        plain = parameter.name.lstrip("_")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if plain not in known:
            if parameter.default is not parameter.empty:
                continue
            close = nearest(parameter.name, known)
            meant = f"did you mean {close[0]!r}? The" if close else "the"
            return Parameters(
                problem=f"has a parameter {parameter.name!r}, which stands for nothing; {meant} "
                f"names are {', '.join(known)}"
            )
        if parameter.kind is parameter.KEYWORD_ONLY or len(names) < position:
            return Parameters(
                problem=f"must take {parameter.name!r} before its optional parameters, not after"
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
