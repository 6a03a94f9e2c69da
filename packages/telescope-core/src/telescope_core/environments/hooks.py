"""Decorators for methods that run around the turns of a rollout: `@setup`, `@stop`, `@cleanup`.

Each marks a sync or async method that takes the episode. Setups run before the first turn, in the
order of their definition. Cleanups run once, in reverse order, however the rollout ends.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal, TypeVar, overload

from telescope_core.base.code_places import location_of, require_known, require_method
from telescope_core.base.errors import EnvironmentLoadError

Method = TypeVar("Method", bound=Callable[..., Any])
Mark = TypeVar("Mark")
HookKind = Literal["setup", "stop", "cleanup"]
CLEANUP_DEADLINE_S = 8.0
"""Must be less than `StageDeadlines.cancel_s`, the time in which a worker ends a cancelled
rollout."""
_MARK = "__telescope_hook__"
MARKS = {"__telescope_score__", _MARK, "__telescope_tool__"}
"""Attributes in which the decorators leave their mark on a method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One decorated method of an environment class."""

    name: str
    kind: HookKind
    deadline_s: float = CLEANUP_DEADLINE_S
    """Seconds that a cleanup may take, in addition to the rollout's own deadline."""


class EpisodeStopped(Exception):
    """A `@stop` method returned True; raised in `generate` to end `play`."""


@overload
def setup(function: Method, /) -> Method: ...
@overload
def setup() -> Callable[[Method], Method]: ...
def setup(*function: Method, **unknown: object) -> Method | Callable[[Method], Method]:
    """Call this method with the episode before the first turn."""
    require_known("@setup", function[1:], unknown, ())
    return _mark(function[0], "setup") if function else lambda inner: _mark(inner, "setup")


@overload
def stop(function: Method, /) -> Method: ...
@overload
def stop() -> Callable[[Method], Method]: ...
def stop(*function: Method, **unknown: object) -> Method | Callable[[Method], Method]:
    """End the rollout as completed when this method, checked after each turn, returns True."""
    require_known("@stop", function[1:], unknown, ())
    return _mark(function[0], "stop") if function else lambda inner: _mark(inner, "stop")


@overload
def cleanup(function: Method, /) -> Method: ...
@overload
def cleanup(*, deadline_s: float = CLEANUP_DEADLINE_S) -> Callable[[Method], Method]: ...
def cleanup(
    function: Method | None = None,
    /,
    *more: object,
    deadline_s: float = CLEANUP_DEADLINE_S,
    **unknown: object,
) -> Method | Callable[[Method], Method]:
    """Call this method with the episode once at the end, even after an error or a cancellation.

    It may take `deadline_s` seconds, in addition to the rollout's own deadline.
    """
    require_known("@cleanup", more, unknown, ("deadline_s",))

    def mark(inner: Method) -> Method:
        return _mark(inner, "cleanup", deadline_s=deadline_s)

    return mark(function) if function is not None else mark


def hooks(owner: type) -> tuple[Hook, ...]:
    """Return the decorated methods of `owner` in source order, those of its bases first."""
    return tuple(replace(mark, name=name) for name, mark in marked(owner, _MARK, Hook).items())


def marked(owner: type, attribute: str, kind: type[Mark]) -> dict[str, Mark]:
    """Return the mark of each method of `owner` that has one, as in `hooks`."""
    found: dict[str, Mark] = {}
    for cls in reversed(owner.__mro__):
        for name, member in vars(cls).items():
            mark = getattr(member, attribute, None)
            if isinstance(mark, kind):
                found[name] = mark
            else:
                found.pop(name, None)
    return found


def require_first(function: Callable[..., Any], kind: str) -> None:
    """Raise EnvironmentLoadError if a marked method of that name is in the class body already.

    Python keeps only the last one, so that the other would not count, and nothing would say so.
    """
    name = getattr(function, "__name__", "")
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_name != "<module>":
        # Only the frame of a class body has this name, which the methods in it begin with.
        body = frame.f_locals.get("__qualname__")
        if body is not None and getattr(function, "__qualname__", "") == f"{body}.{name}":
            other = frame.f_locals.get(name)
            if other is not function and MARKS & set(getattr(other, "__dict__", ())):
                raise EnvironmentLoadError(
                    f"{kind} {location_of(function)} would replace {location_of(other)}, which "
                    "has the same name in the same class; rename one of the two"
                )
            return
        frame = frame.f_back


def of_kind(all_hooks: Sequence[Hook], kind: HookKind) -> list[Hook]:
    """Return the hooks of one kind, in order."""
    return [hook for hook in all_hooks if hook.kind == kind]


def _mark(function: Method, kind: HookKind, *, deadline_s: float = CLEANUP_DEADLINE_S) -> Method:
    require_method(function, f"@{kind}")
    other = getattr(function, _MARK, None)
    if other is not None:
        raise EnvironmentLoadError(
            f"{location_of(function)} is marked with @{other.kind} and @{kind}; keep one of them"
        )
    require_first(function, kind)
    name = getattr(function, "__name__", "")
    setattr(function, _MARK, Hook(name=name, kind=kind, deadline_s=deadline_s))
    return function
