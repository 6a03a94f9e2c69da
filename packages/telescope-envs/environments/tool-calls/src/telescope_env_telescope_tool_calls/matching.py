"""Compares the calls that were made with those that were wanted: order is free, types are not.

A wanted call gives, for each argument, the values that are accepted. Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from telescope_core.types import JsonValue, ToolCall

_MAX_ARGUMENTS = 20_000
_MAX_CALLS = 100
_IGNORED = re.compile(r"[\s,./\-_*^'\"]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCall:
    """One call of the right answer."""

    name: str
    arguments: Mapping[str, Sequence[JsonValue]]
    """Accepted values of each argument; inside an object, again a list for each of its keys."""
    may_omit: frozenset[str] = frozenset()
    """Arguments that may be left out."""
    types: Mapping[str, str]
    """JSON type of each parameter of the function; "" = any."""

    def first_accepted(self) -> dict[str, JsonValue]:
        """Return the arguments of a right call, without those that may be left out."""
        return {
            name: _plain_value(next(iter(accepted), None))
            for name, accepted in self.arguments.items()
            if name not in self.may_omit
        }


def share_right(calls: Sequence[ToolCall], wanted: Sequence[WantedCall]) -> float:
    """Return the number of right calls, divided by the number made or wanted, the larger one."""
    if not wanted or len(calls) > _MAX_CALLS:
        return 0.0
    fits = [[is_right(call, one) for one in wanted] for call in calls]
    return _num_pairs(fits, len(wanted)) / max(len(wanted), len(calls))


def is_right(call: ToolCall, wanted: WantedCall) -> bool:
    """Whether a call has the right name, no argument too many, and only accepted values."""
    given = read_arguments(call)
    if given is None or call.name != wanted.name or set(given) - set(wanted.arguments):
        return False
    return all(
        name in wanted.may_omit
        if name not in given
        else any(_fits(given[name], value, wanted.types.get(name, "")) for value in accepted)
        for name, accepted in wanted.arguments.items()
    )


def _fits(value: JsonValue, accepted: JsonValue, wanted_type: str) -> bool:
    """Whether `value` is accepted, in the type of its parameter or in that of the accepted value.

    Datasets accept values that their own functions do not: null for one that may be left out, or
    a number for a text.
    """
    is_of_type = has_type(value, wanted_type) or type(value) is type(accepted)
    return is_of_type and is_accepted(value, accepted)


def read_arguments(call: ToolCall) -> dict[str, JsonValue] | None:
    """Return the arguments of a call; None if they are not a JSON object."""
    if len(call.arguments) > _MAX_ARGUMENTS:
        return None
    try:
        given: object = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, JsonValue], given) if isinstance(given, dict) else None


def has_type(value: JsonValue, wanted: str) -> bool:
    """Whether `value` has the JSON type `wanted`; a number may be whole."""
    if isinstance(value, bool):
        return wanted in ("boolean", "")
    kinds: dict[str, tuple[type, ...]] = {
        "integer": (int,),
        "number": (int, float),
        "string": (str,),
        "array": (list,),
        "object": (dict,),
        "boolean": (),
    }
    return wanted not in kinds or isinstance(value, kinds[wanted])


def is_accepted(value: JsonValue, wanted: JsonValue) -> bool:
    """Whether `value` equals `wanted`: text without case, spaces and `, . / - _ * ^` and quotes."""
    if isinstance(wanted, str):
        return isinstance(value, str) and _plain(value) == _plain(wanted)
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if isinstance(wanted, Mapping):
        keys = cast(Mapping[str, Sequence[JsonValue]], wanted)
        return isinstance(value, dict) and _same_keys(value, keys)
    if isinstance(wanted, list | tuple):
        parts = cast(Sequence[JsonValue], wanted)
        given = value if isinstance(value, list) else None
        if given is None or len(given) != len(parts):
            return False
        return all(is_accepted(one, other) for one, other in zip(given, parts, strict=True))
    return type(value) in (int, float, type(None)) and value == wanted


def _same_keys(value: dict[str, JsonValue], wanted: Mapping[str, Sequence[JsonValue]]) -> bool:
    if set(value) - set(wanted) or not all(
        isinstance(accepted, list | tuple) for accepted in wanted.values()
    ):
        return False
    return all(
        any(is_accepted(value[key], one) for one in accepted) if key in value else "" in accepted
        for key, accepted in wanted.items()
    )


def _plain_value(value: JsonValue) -> JsonValue:
    """Return `value` with the first accepted value for each key of an object."""
    if isinstance(value, Mapping):
        keys = cast(Mapping[str, JsonValue], value)
        return {
            key: _plain_value(given[0])
            for key, given in keys.items()
            if isinstance(given, list | tuple) and given and given[0] != ""
        }
    if isinstance(value, list | tuple):
        return [_plain_value(one) for one in cast(Sequence[JsonValue], value)]
    return value


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).casefold()


def _num_pairs(fits: Sequence[Sequence[bool]], num_wanted: int) -> int:
    """Return the most pairs of a call and a wanted call that fit, each used once."""
    partner: dict[int, int] = {}

    def place(call: int, seen: set[int]) -> bool:
        for one in range(num_wanted):
            if fits[call][one] and one not in seen:
                seen.add(one)
                if one not in partner or place(partner[one], seen):
                    partner[one] = call
                    return True
        return False

    return sum(place(call, set()) for call in range(len(fits)))
