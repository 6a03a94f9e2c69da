"""Grade a program that a model wrote by hidden tests, which never enter its sandbox.

Only the inputs of one test enter the sandbox. The output is text or JSON and is compared here: an
object that equals everything is no JSON, and the sandbox holds nothing to read or overwrite. A
program that crashes, hangs, or ends its sandbox has failed. A provider's failure raises.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from telescope_core.base.types import JsonValue
from telescope_core.sandboxes.protocol import CommandResult, Sandbox, StopCause

_CALL = """
import json, os, sys
_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
_given = json.loads(sys.stdin.read())
_space = {"__name__": "solution"}
exec(compile(_given["program"], "solution.py", "exec"), _space)
_first, *_rest = _given["function"].split(".")
_called = _space[_first]
for _name in _rest:
    _called = getattr(_called() if isinstance(_called, type) else _called, _name)
_value = _called(*_given["arguments"], **_given["keywords"])
json.dump({"value": _value}, _out)
_out.flush()
"""
_MAX_SAID = 400
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

    `timeout_s` is for one test. Numbers may differ by `tolerance`, absolute or relative, if it is
    above 0. Raises SandboxError only if the provider failed.
    """
    outcomes: list[HiddenTestOutcome] = []
    unfit = why_not_run(program)
    for test in tests:
        if unfit:
            outcome = HiddenTestOutcome(passed=False, reason=unfit, wall_s=0.0)
        elif isinstance(test, StdinTest):
            outcome = await _by_stdin(sandbox, program, test, timeout_s, tolerance)
        else:
            outcome = await _by_call(sandbox, program, test, timeout_s, tolerance)
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

    Numbers may differ by `tolerance`, absolute or relative, if it is above 0.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return _same_number(value, expected, tolerance)
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
    """Return whether texts are equal, except for white space at the ends of lines and text.

    With a `tolerance`, words that are numbers may differ by it.
    """
    came, wanted = output.strip(), expected.strip()
    lines = [line.split() if tolerance else [line.rstrip()] for line in came.split("\n")]
    others = [line.split() if tolerance else [line.rstrip()] for line in wanted.split("\n")]
    return len(lines) == len(others) and all(
        len(words) == len(right)
        and all(_same_word(one, other, tolerance) for one, other in zip(words, right, strict=True))
        for words, right in zip(lines, others, strict=True)
    )


async def _by_stdin(
    sandbox: Sandbox, program: str, test: StdinTest, timeout_s: float, tolerance: float
) -> HiddenTestOutcome:
    done = await sandbox.run(
        ["python3", "-c", program, *test.arguments],
        stdin=test.stdin.encode(),
        timeout_s=timeout_s,
    )
    reason = why_no_answer(done)
    if not reason and not same_output(done.text, test.expected, tolerance):
        reason = f"wrong output: {done.text.strip()[:_MAX_SAID]}"
    return HiddenTestOutcome(passed=not reason, reason=reason, wall_s=done.wall_s)


async def _by_call(
    sandbox: Sandbox, program: str, test: CallTest, timeout_s: float, tolerance: float
) -> HiddenTestOutcome:
    given = {
        "program": program,
        "function": test.function,
        "arguments": list(test.arguments),
        "keywords": dict(test.keywords),
    }
    done = await sandbox.run(
        ["python3", "-c", _CALL], stdin=json.dumps(given).encode(), timeout_s=timeout_s
    )
    reason = why_no_answer(done)
    if not reason:
        reason = _why_wrong(done.stdout, (test.expected, *test.alternatives), tolerance)
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
    if not tolerance:
        return False
    try:
        return _same_number(float(word), float(expected), tolerance)
    except ValueError:
        return False


def _same_number(value: float, expected: float, tolerance: float) -> bool:
    if value == expected or (value != value and expected != expected):
        return True
    try:
        return tolerance > 0 and math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond every float
        return False
