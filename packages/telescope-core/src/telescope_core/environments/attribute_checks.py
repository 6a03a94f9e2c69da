"""Check the values and names that an environment class sets, before anything is played with them.

`class_checks` looks at its methods.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from telescope_core.base.code_places import is_own_module, location_of, raised_at
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.environments.author_errors import contained

NETWORKS = ("none", "load", "always")
_MARKS = {"__telescope_score__", "__telescope_hook__", "__telescope_tool__"}
_PLAIN_METHODS = ("function", "method_descriptor", "classmethod", "staticmethod")


class _Kind(NamedTuple):
    fits: Callable[[Any], bool]
    text: str
    """Words for the expected value, for the message."""


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number; True and False are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_answer(value: object) -> bool:
    return value is None or isinstance(value, bool)


_NUMBER = _Kind(is_number, "a finite number")
_COUNT = _Kind(_is_count, "a whole number that is at least 1")
_KINDS: Mapping[str, _Kind] = {
    "system_prompt": _Kind(_is_text, "text"),
    "network": _Kind(NETWORKS.__contains__, f"one of {', '.join(NETWORKS)}"),
    "needs_answer": _Kind(_is_answer, "True, False or None"),
    "reward_min": _NUMBER,
    "reward_max": _NUMBER,
    "success_threshold": _NUMBER,
    "max_turns": _COUNT,
    "max_threads": _COUNT,
    "max_processes": _COUNT,
}


def check_values(owner: type, *, known: set[str], where: str) -> None:
    """Raise EnvironmentLoadError for a class attribute of the wrong kind."""
    for name, value in vars(owner).items():
        if name not in _KINDS or name not in known:
            continue
        # Only an instance has the value of a property, and `check_built` looks at it there.
        is_computed = hasattr(value, "__get__") and type(value).__name__ not in _PLAIN_METHODS
        if not is_computed:
            _require(name, value, where)


def check_built(environment: object, *, known: set[str], where: str) -> None:
    """Raise EnvironmentLoadError for an attribute that a built environment cannot be played with.

    It may have been set in the class, in the constructor, or by a property.
    """
    one: Any = environment
    for name in _KINDS:
        if name not in known:
            continue
        try:
            with contained():
                value = getattr(one, name)
        except Exception as error:
            text = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            raise EnvironmentLoadError(
                f"{where}: {name} raised {text}{raised_at(error)}"
            ) from error
        _require(name, value, where)
    low, high, success = one.reward_min, one.reward_max, one.success_threshold
    if not low < high:
        raise EnvironmentLoadError(
            f"{where}: reward_min must be below reward_max, got {low:g} and {high:g}"
        )
    if not low < success <= high:
        what = "no rollout could" if success > high else "every rollout would"
        raise EnvironmentLoadError(
            f"{where}: {what} count as solved, because success_threshold is {success:g} and "
            f"rewards go from {low:g} to {high:g}; set success_threshold to the reward of a "
            "rollout that solves its example"
        )


def check_names(owner: type, *, where: str) -> None:
    """Refuse the author's names that Telescope's own classes already use for something else."""
    own = _own_members(owner) if not is_own_module(owner.__module__) else {}
    for name, value in vars(owner).items():
        if name not in own:
            continue
        function = getattr(value, "__func__", value)
        marks = _marks(function)
        if marks and not _marks(own[name]):
            kind = getattr(getattr(function, marks.pop()), "kind", "tool")
            raise EnvironmentLoadError(
                f"{kind} {location_of(function)}: Telescope's own {name!r} would be replaced by "
                f"it; give it another name, such as {name}_{kind}"
            )
        if callable(own[name]) and not (callable(value) or hasattr(value, "__get__")):
            advice = f"write: def {name}(self, ...)"
            if name == "examples":
                advice = "give a list or a file as `data`, or write: def examples(self, split)"
            raise EnvironmentLoadError(
                f"{where}: {name} must be a method, got {value!r:.80} ({type(value).__name__}); "
                f"{advice}"
            )


def _marks(function: object) -> set[str]:
    """Return the names of the decorators that have marked a method."""
    return _MARKS & set(getattr(function, "__dict__", ()))


def _own_members(owner: type) -> dict[str, object]:
    """Return the public names that Telescope's bases of `owner` define, with their values."""
    found: dict[str, object] = {"config": None}
    for base in reversed(owner.__mro__):
        if is_own_module(base.__module__):
            declared = {*vars(base), *getattr(base, "__annotations__", {})}
            found |= {name: vars(base).get(name) for name in sorted(declared) if name[0] != "_"}
    return {name: value for name, value in found.items() if not isinstance(value, type)}


def _require(name: str, value: object, where: str) -> None:
    kind = _KINDS[name]
    if kind.fits(value):
        return
    got = f"{value!r:.80} ({type(value).__name__})"
    advice = ""
    if callable(value):
        got, advice = "a method", "; make it a @property if it has to be computed"
    elif isinstance(value, bytes):
        advice = "; decode it: value.decode()"
    raise EnvironmentLoadError(f"{where}: {name} must be {kind.text}, got {got}{advice}")
