"""Grade a program that a model wrote by hidden tests, which never enter its sandbox.

Only the inputs of one test enter the sandbox. The output is text or JSON and is compared here: an
object that equals everything is no JSON, and the sandbox holds nothing to read or overwrite. A
program that crashes, hangs, or ends its sandbox has failed. A provider's failure raises.
`call_function` is for tests that need more than JSON has. Their values are rebuilt here from JSON:
only the built-in types come back, and comparing them runs no code of the program's.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple, cast

from telescope_core.base.types import JsonValue
from telescope_core.sandboxes.protocol import CommandResult, Sandbox, StopCause

_CALL = """
import json, os, sys
_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
_given = json.loads(sys.stdin.read())
# A module, because pickle and dataclasses look in it for what the program defines.
_module = sys.modules["solution"] = type(sys)("solution")
_space = vars(_module)
exec(compile(_given["program"], "solution.py", "exec"), _space)
_first, *_rest = _given["function"].split(".")
_called = _space[_first]
for _name in _rest:
    _called = getattr(_called() if isinstance(_called, type) else _called, _name)
_value = _called(*_given["arguments"], **_given["keywords"])
json.dump({"value": _value}, _out)
_out.flush()
"""
_WAITS = 10
"""Most time of a test on the clock, in multiples of its limit of processor time.

How long a program takes on the clock depends on what else the machine does, such as grading other
programs. Its reward must not.
"""
_MARK = "\ufeff"
"""Begins some files of text. Python takes it in a file, and not in a text."""
_MAX_SAID = 400
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
"""A number in an output. Longer exponents are no number's that a problem asks for, and NaN and
infinities are words like others."""
MAX_PROGRAM_BYTES = 100_000
"""Linux takes 128 KiB in one argument of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """A program reads `stdin` and must write `expected` to standard output."""

    stdin: str
    expected: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call of a function, which must return `expected`; all are JSON values."""

    function: str
    """Name in the program: `solve`, or `Solution.solve` for a class without arguments."""
    arguments: Sequence[JsonValue] = ()
    keywords: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    expected: JsonValue = None
    alternatives: Sequence[JsonValue] = ()
    """Further right values, besides `expected`."""


HiddenTest = StdinTest | CallTest


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTestOutcome:
    """The outcome of one hidden test."""

    passed: bool
    reason: str
    """Reason for the failure, without the expected output; empty if it passed."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The outcome of all tests."""

    outcomes: tuple[HiddenTestOutcome, ...]
    """In the order of the tests; those after the first failure are missing if it stopped there."""
    num_tests: int

    @property
    def num_passed(self) -> int:
        """Number of tests that passed."""
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        """Whether there was a test and every one passed."""
        return 0 < self.num_tests == self.num_passed

    @property
    def fraction(self) -> float:
        """Share of tests that passed, 0 to 1; tests that were not run count as failed."""
        return self.num_passed / self.num_tests if self.num_tests else 0.0


async def grade_program(
    sandbox: Sandbox,
    program: str,
    tests: Sequence[HiddenTest],
    *,
    timeout_s: float = 10.0,
    tolerance: float = 0.0,
    stop_at_failure: bool = True,
) -> Grade:
    """Run each test in its own process and compare the output; for Python programs only.

    `timeout_s` is for one test: seconds of processor time, rounded up to whole ones. A test that
    waits instead of computing is stopped after ten times as long on the clock. Numbers that are not
    whole may differ by `tolerance`, as `same_json` and `same_output` say. Raises SandboxError only
    if the provider failed.
    """
    outcomes: list[HiddenTestOutcome] = []
    program = program.removeprefix(_MARK)
    unfit = why_not_run(program)
    for test in tests:
        if unfit:
            outcome = HiddenTestOutcome(passed=False, reason=unfit, wall_s=0.0)
        else:
            outcome = await _outcome(sandbox, program, test, timeout_s, tolerance)
        outcomes.append(outcome)
        if stop_at_failure and not outcome.passed:
            break
    return Grade(outcomes=tuple(outcomes), num_tests=len(tests))


def why_not_run(program: str) -> str:
    """Return why no process can be started with `program` as its text; empty if one can."""
    try:
        num_bytes = len(program.encode())
    except UnicodeEncodeError:
        return "the program holds characters that are no Unicode text"
    if num_bytes > MAX_PROGRAM_BYTES:
        return f"the program has {num_bytes} bytes, more than {MAX_PROGRAM_BYTES}"
    return "the program holds a NUL character" if "\0" in program else ""


def same_json(value: JsonValue, expected: JsonValue, tolerance: float = 0.0) -> bool:
    """Return whether two JSON values are equal: True is not 1, and 1 is 1.0.

    Floats may differ by `tolerance`, absolute or relative, and a float from an integer by as much,
    absolute alone. Two integers may not.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        if value == expected or (value != value and expected != expected):
            return True
        whole = sum(isinstance(one, int) for one in (value, expected))
        return whole < 2 and _is_near(Decimal(value), Decimal(expected), tolerance, whole == 0)
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(
            same_json(one, other, tolerance) for one, other in zip(value, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(
            same_json(value[key], other, tolerance) for key, other in expected.items()
        )
    return type(value) is type(expected) and value == expected


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Return whether texts have the same words on each line, however these are spaced.

    Whole numbers are words like others: 007 is not 7. Where one of two numbers has a point or an
    exponent their worth counts: 1.50 is 1.5, and 3.0 is 3. Such numbers may differ by `tolerance`,
    absolute, or also relative if both have one.
    """
    lines = [line.split() for line in output.strip().split("\n")]
    others = [line.split() for line in expected.strip().split("\n")]
    return len(lines) == len(others) and all(
        len(words) == len(right)
        and all(_same_word(one, other, tolerance) for one, other in zip(words, right, strict=True))
        for words, right in zip(lines, others, strict=True)
    )


async def _run(
    sandbox: Sandbox, program: str, stdin: str, timeout_s: float, arguments: Sequence[str] = ()
) -> CommandResult:
    return await sandbox.run(
        ["python3", "-c", program, *arguments],
        stdin=stdin.encode(),
        timeout_s=timeout_s * _WAITS,
        cpu_timeout_s=timeout_s,
    )


async def _outcome(
    sandbox: Sandbox, program: str, test: HiddenTest, timeout_s: float, tolerance: float
) -> HiddenTestOutcome:
    if isinstance(test, StdinTest):
        done = await _run(sandbox, program, test.stdin, timeout_s, test.arguments)
        reason = why_no_answer(done)
        if not reason and not same_output(done.text, test.expected, tolerance):
            reason = f"wrong output: {done.text.strip()[:_MAX_SAID]}"
    else:
        given = {
            "program": program,
            "function": test.function,
            "arguments": list(test.arguments),
            "keywords": dict(test.keywords),
        }
        done = await _run(sandbox, _CALL, json.dumps(given), timeout_s)
        right = (test.expected, *test.alternatives)
        reason = why_no_answer(done) or _why_wrong(done.stdout, right, tolerance)
    return HiddenTestOutcome(passed=not reason, reason=reason, wall_s=done.wall_s)


def _why_wrong(output: bytes, right: Sequence[JsonValue], tolerance: float) -> str:
    try:
        answer = cast(object, json.loads(output))
    except (ValueError, RecursionError):
        return "no JSON value came back"
    if not isinstance(answer, dict) or "value" not in answer:
        return "no JSON value came back"
    value = cast(dict[str, JsonValue], answer)["value"]
    # As it would be after its own way through JSON: a tuple is a list, keys are texts.
    wanted = cast(list[JsonValue], json.loads(json.dumps(list(right))))
    try:
        is_same = any(same_json(value, one, tolerance) for one in wanted)
    except RecursionError:
        is_same = False
    return "" if is_same else f"wrong value: {json.dumps(value)[:_MAX_SAID]}"


def why_no_answer(done: CommandResult) -> str:
    """Return why a program's output does not count as an answer; empty if it does."""
    reasons: Mapping[StopCause, str] = {
        StopCause.TIMEOUT: "took too long",
        StopCause.MEMORY: "took too much memory",
        StopCause.SANDBOX_ENDED: "brought its sandbox to an end",
    }
    if done.stop in reasons:
        return reasons[done.stop]
    if done.num_dropped_bytes:
        return "wrote too much"
    if done.exit_code != 0:
        last = done.error_text.strip().splitlines()[-1:] or [""]
        return f"ended with exit code {done.exit_code}: {last[0][:_MAX_SAID]}"
    return ""


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    num_whole = sum(one.lstrip("+-").isdigit() for one in (word, expected))
    return num_whole < 2 and _is_near(Decimal(word), Decimal(expected), tolerance, num_whole == 0)


_WHOLE = 1e-12
"""Largest relative tolerance between two whole numbers."""


def _is_near(value: Decimal, expected: Decimal, tolerance: float, is_relative: bool) -> bool:
    """Return whether two numbers differ by at most `tolerance`, and infinities by nothing.

    A whole number is compared without `is_relative`, as a relative tolerance would take another
    whole number for a large one. Where both are whole and have a point, only what float64 rounds
    is relative: 1e18 and the float beside it may be the same.
    """
    if not tolerance or not (value.is_finite() and expected.is_finite()):
        return value == expected
    try:
        if is_relative and all(one == one.to_integral_value() for one in (value, expected)):
            tolerance = min(tolerance, _WHOLE)
        size = max(abs(value), abs(expected), Decimal(1)) if is_relative else Decimal(1)
        return abs(value - expected) <= Decimal(str(tolerance)) * size
    except ArithmeticError:
        return False  # A number of more digits than Decimal computes with


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
# A value of a subclass, such as Counter, is read by the methods of its built-in type, because its
# own ones may say anything.
_alone = ((int, int.__int__), (float, float.__float__), (str, str.__str__))
_reads = [(name, kind, kind.__iter__) for name, kind in _many.items()]
def _encoded(value, _plain=_plain, _alone=_alone, _reads=_reads, _dict=dict, _items=dict.items,
             _type=type, _is=isinstance):
    kind = _type(value)
    if kind in _plain:
        return value
    for one, read in _alone:
        if _is(value, one):
            return read(value)
    for name, one, read in _reads:
        if _is(value, one):
            return {name: [_encoded(inner) for inner in read(value)]}
    if _is(value, _dict):
        return {"dict": [[_encoded(key), _encoded(inner)] for key, inner in _items(value)]}
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
# A module, because pickle and dataclasses look in it for what the program defines.
_module = sys.modules["solution"] = type(sys)("solution")
_space = vars(_module)
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
    of them. A value of a subclass, such as Counter, comes back as one of these. `timeout_s` is for
    all calls together, and counts as in `grade_program`. Raises SandboxError only if the provider
    failed.
    """
    program = program.removeprefix(_MARK)
    unfit = why_not_run(program)
    if unfit:
        return Returned(reason=unfit)
    given = {"program": program, "function": function, "calls": [encoded(one) for one in calls]}
    done = await _run(sandbox, _CALLS, json.dumps(given), timeout_s)
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
