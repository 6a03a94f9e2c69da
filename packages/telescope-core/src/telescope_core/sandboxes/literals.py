"""Call a function of a model's program with plain Python values, and get plain values back.

For tests that need more than JSON has: tuples, sets, and dictionaries whose keys are no text. The
values are rebuilt outside the sandbox from JSON, so that only the built-in types come back, and
comparing them runs no code of the program's.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from telescope_core.base.types import JsonValue
from telescope_core.sandboxes.grading import why_no_answer, why_not_run
from telescope_core.sandboxes.protocol import Sandbox

MAX_DEPTH = 100
"""Most levels of nested containers in an answer, including its list of values.

Graders copy and compare values, which Python does by recursion.
"""
MAX_COMPARISONS = 2**22
"""Most comparisons of plain values for building all sets and dictionaries of an answer.

Python compares members of equal hash one by one, and a program can choose integers, or tuples and
frozen sets of small ones, that all have the same hash.
"""
_MANY = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_CALLS = """
import json, os, sys
_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
_many = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_plain = (type(None), bool, int, float, str)
def _encoded(value, _plain=_plain, _many=_many, _type=type):
    kind = _type(value)
    if kind in _plain:
        return value
    for name, one in _many.items():
        if kind is one:
            return {name: [_encoded(inner) for inner in value]}
    if kind is dict:
        return {"dict": [[_encoded(key), _encoded(inner)] for key, inner in value.items()]}
    raise TypeError(f"a value of type {kind.__name__} was returned")
def _decoded(value, _many=_many):
    if not isinstance(value, dict):
        return value
    (name, inner), = value.items()
    if name == "dict":
        return {_decoded(key): _decoded(one) for key, one in inner}
    return _many[name](_decoded(one) for one in inner)
_given = json.loads(sys.stdin.read())
_dump = json.dump
_space = {"__name__": "solution"}
exec(compile(_given["program"], "solution.py", "exec"), _space)
_function = _space[_given["function"]]
_values = [_encoded(_function(*_decoded(one))) for one in _given["calls"]]
_dump(_values, _out)
_out.flush()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The results of the calls of a function."""

    values: tuple[object, ...] = ()
    """One value for each call, of built-in types only; empty if there is a reason."""
    reason: str = ""
    """Reason why there are no values: the failure of the program."""


async def call_function(
    sandbox: Sandbox,
    program: str,
    function: str,
    calls: Sequence[tuple[object, ...]],
    *,
    timeout_s: float = 10.0,
) -> Returned:
    """Call `function` of `program` with each tuple of arguments, in one process, in order.

    Arguments and values are None, bool, int, float, str, and lists, tuples, sets and dictionaries
    of them. `timeout_s` is for all calls together. Raises SandboxError only if the provider failed.
    """
    unfit = why_not_run(program)
    if unfit:
        return Returned(reason=unfit)
    given = {"program": program, "function": function, "calls": [encoded(one) for one in calls]}
    done = await sandbox.run(
        ["python3", "-c", _CALLS], stdin=json.dumps(given).encode(), timeout_s=timeout_s
    )
    reason = why_no_answer(done)
    if reason:
        return Returned(reason=reason)
    try:
        values = decoded({"list": json.loads(done.stdout)})
    except TooManyError as error:
        return Returned(reason=str(error))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Returned(reason="no values came back")
    returned = tuple(cast(list[object], values))
    if len(returned) != len(calls):
        return Returned(reason="no values came back")
    return Returned(values=returned)


def encoded(value: object) -> JsonValue:
    """Return a plain value as JSON from which `decoded` makes it again."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in _MANY.items():
        if type(value) is kind:
            return {name: [encoded(one) for one in cast(Sequence[object], value)]}
    if type(value) is dict:
        items = cast(dict[object, object], value).items()
        return {"dict": [[encoded(key), encoded(one)] for key, one in items]}
    raise TypeError(f"expected a plain value, got {type(value).__name__}")


class TooManyError(ValueError):
    """Comparing a value would take too long."""


def decoded(value: JsonValue) -> object:
    """Return the plain value that `encoded` wrote; raises ValueError, TypeError or KeyError.

    Takes time in proportion to the size of `value`: TooManyError is raised before members of equal
    hash are compared more than `MAX_COMPARISONS` times.
    """
    return _Decoder().read(value, depth=0).value


class _Read(NamedTuple):
    value: object
    cost: int
    """Most comparisons of plain values for comparing it with a value of the same hash."""


class _Decoder:
    """Decodes the parts of one answer, which share a limit on comparisons."""

    def __init__(self) -> None:
        self._num_comparisons = 0

    def read(self, value: JsonValue, *, depth: int) -> _Read:
        if isinstance(value, list):
            raise TypeError("a list must say what it is")
        if not isinstance(value, dict):
            return _Read(value, 1)
        if depth >= MAX_DEPTH:
            raise TooManyError(f"a value is nested deeper than {MAX_DEPTH - 1}")
        if len(value) != 1:
            raise ValueError(f"expected one name, got {len(value)}")
        ((name, inner),) = value.items()
        if not isinstance(inner, list):
            raise TypeError(f"expected a list, got {type(inner).__name__}")
        if name == "dict":
            pairs = [cast(list[JsonValue], one) for one in inner]
            read = [[self.read(one, depth=depth + 1) for one in (key, one)] for key, one in pairs]
            self._charge([key for key, _ in read])
            # It is no member of anything, so it is compared with no other.
            return _Read({key.value: one.value for key, one in read}, 0)
        kind, members = _MANY[name], [self.read(one, depth=depth + 1) for one in inner]
        is_hashed = kind is set or kind is frozenset
        cost = self._charge(members) if is_hashed else sum(one.cost for one in members)
        return _Read(kind(one.value for one in members), 1 + cost)

    def _charge(self, members: Sequence[_Read]) -> int:
        """Return the cost of looking up each of `members`, and count the cost of adding them."""
        hashes = [hash(one.value) for one in members]
        if len(set(hashes)) == len(hashes):
            return sum(one.cost for one in members)
        by_hash = defaultdict[int, list[int]](list)
        for value_hash, one in zip(hashes, members, strict=True):
            by_hash[value_hash].append(one.cost)
        self._num_comparisons += sum((len(same) - 1) * sum(same) for same in by_hash.values())
        if self._num_comparisons > MAX_COMPARISONS:
            raise TooManyError("too many members of a set or dictionary have the same hash")
        return sum(len(same) * sum(same) for same in by_hash.values())
