"""`MathGrader`: decides whether a final answer has the same value as the right one.

Threads cannot be stopped and signals reach only the main thread, so a comparison of formulas, which
may take minutes, has to run in another process: `Helpers`.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import prod
from typing import Any

from telescope_core.base.errors import EnvironmentLoadError, ProcessDiedError
from telescope_core.base.open_files import is_ready
from telescope_core.graders.mathematics.comparing import CPU_LIMIT_SIGNAL, Verdict
from telescope_core.graders.mathematics.notation import MAX_CHARACTERS, normalized
from telescope_core.graders.mathematics.numbers import Amount
from telescope_core.graders.mathematics.values import (
    Formula,
    Grouped,
    Named,
    Unreadable,
    Value,
    ValueKind,
    Words,
    choice_of,
    distinct,
    may_cancel,
    read_value,
    split_list,
)

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from telescope_core.graders.mathematics.comparing import main; main()"
)
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT", "LD_LIBRARY_PATH")
_START_LIMIT_S = 120.0
_WALL_PER_CPU = 30.0
"""Seconds of wall time per second of processor time, after which the machine is to blame."""
_OWN_ENDS = frozenset({-CPU_LIMIT_SIGNAL, -6, -11})
"""Exit codes that the formulas cause: out of time, or a parser out of stack or memory."""


class Helpers:
    """At most `max_helpers` processes, started on demand; each compares one pair at a time.

    One that takes too long for a pair is killed. Several threads may call `compare` at once; each
    uses one process while it waits.
    """

    def __init__(self, *, max_helpers: int, cpu_limit_s: float) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._lanes = threading.BoundedSemaphore(max_helpers)
        self._lock = threading.Lock()
        self._idle: list[_Helper] = []
        self._busy: set[_Helper] = set()
        self._is_closed = False

    def compare(self, answer: str, right: str) -> Verdict:
        """Return whether two formulas have the same value; unreadable if the time runs out.

        Raises EnvironmentLoadError without `math-verify`, ProcessDiedError when a process dies for
        another reason than the formulas.
        """
        with self._lanes:
            helper = self._take()
            try:
                verdict = helper.ask(answer, right, self._cpu_limit_s)
            except BaseException:
                helper.kill()
                with self._lock:
                    self._busy.discard(helper)
                raise
            self._give_back(helper)
            return verdict

    def close(self) -> None:
        """End all processes; a comparison that is going on raises ProcessDiedError."""
        with self._lock:
            self._is_closed = True
            helpers = [*self._idle, *self._busy]
            self._idle.clear()
        for helper in helpers:
            helper.kill()

    def _take(self) -> "_Helper":
        with self._lock:
            if self._is_closed:
                raise ProcessDiedError("the grader of mathematics is closed; build another one")
            helper = self._idle.pop() if self._idle else _Helper()
            self._busy.add(helper)
        return helper

    def _give_back(self, helper: "_Helper") -> None:
        with self._lock:
            self._busy.discard(helper)
            if helper.is_running and not self._is_closed:
                self._idle.append(helper)
                return
        helper.kill()


class _Helper:
    """One process; it is started by the first pair."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._kept = b""
        self._is_killed = False
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, answer: str, right: str, cpu_limit_s: float) -> Verdict:
        process = self._started()
        assert process.stdin is not None, "it was started with a pipe"
        with suppress(OSError):  # when it is dead, which the answer tells
            process.stdin.write(f"{json.dumps([answer, right, cpu_limit_s])}\n".encode())
            process.stdin.flush()
        told = self._answer(process, _WALL_PER_CPU * cpu_limit_s)
        if told is not None:
            return Verdict(told["verdict"])
        status = process.wait()
        if status in _OWN_ENDS:
            return Verdict.UNREADABLE
        raise ProcessDiedError(
            f"a process that compares formulas ended with status {status} (a negative status is "
            "the signal that killed it; -9 often means that memory ran out)"
        )

    def kill(self) -> None:
        with self._lock:
            self._is_killed = True
            process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not yet written is for a process that is gone
                    pipe.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None:
            return self._process
        process = self._start()
        told = self._answer(process, _START_LIMIT_S)
        if told is None:
            raise ProcessDiedError(
                f"a process that compares formulas ended with status {process.wait()} before it "
                "was ready"
            )
        if "problem" in told:
            raise EnvironmentLoadError(
                f"answers that are no numbers are compared by math-verify: {told['problem']}; "
                "run: pip install 'telescope-core[math]'"
            )
        return process

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_killed:
                raise ProcessDiedError("the grader of mathematics was closed")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            )
            return self._process

    def _answer(self, process: "subprocess.Popen[bytes]", limit_s: float) -> Any:
        """Return the next line of `process`; None if it ends without one."""
        assert process.stdout is not None, "it was started with a pipe"
        descriptor = process.stdout.fileno()
        ends_s = time.monotonic() + limit_s
        while b"\n" not in self._kept:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not is_ready(descriptor, wait_s=left_s):
                raise ProcessDiedError(
                    f"a process that compares formulas said nothing for {limit_s:g} s; the machine "
                    "is too busy"
                )
            part = os.read(descriptor, 1 << 16)
            if not part:
                return None
            self._kept += part
        line, _, self._kept = self._kept.partition(b"\n")
        return json.loads(line)


_MAX_POWER = 1000
_EXPONENT = re.compile(r"\^[\s{(\\-]*([0-9]+)", re.ASCII)


def is_worth_comparing(answer: str) -> bool:
    """Return whether `answer` is short and free of towers of powers.

    A comparison is bounded anyway, by processor time; this only keeps a policy that writes such
    answers again and again from spending all of it.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    exponents = [max(1, int(exponent)) for exponent in _EXPONENT.findall(answer)]
    return prod(exponents) <= _MAX_POWER and not _has_nested_power(answer.replace("**", "^"))


def _has_nested_power(text: str) -> bool:
    """Return whether an exponent holds or is followed by a power, as in `2^{3^4}` or `2^3^4`."""
    inside_exponent = [False]
    expects_exponent = follows_exponent = False
    for character in text:
        if character == "^":
            if inside_exponent[-1] or follows_exponent or expects_exponent:
                return True
            expects_exponent = True
        elif character in "{(":
            inside_exponent.append(inside_exponent[-1] or expects_exponent)
            expects_exponent = follows_exponent = False
        elif character in "})":
            was_exponent = inside_exponent.pop() if len(inside_exponent) > 1 else False
            follows_exponent = was_exponent and not inside_exponent[-1]
            expects_exponent = False
        elif not character.isspace():
            follows_exponent = expects_exponent or (follows_exponent and character.isalnum())
            expects_exponent = False
    return False


CPU_LIMIT_S = 2.0
"""Processor time of one comparison; usual ones take a millisecond."""
_KEPT = 1024
"""Verdicts that are cached, so that a reward and a metric of one rollout compare only once."""
_CAPITALS = re.compile(r"(m?\\(?:measured)?angle)?([A-Z]{2,})")
_CHOICE = re.compile(r"(?:\\text\{ *)?\(?([A-J])\)?(?: *\})?")
_ANY_ORDER = {ValueKind.LIST, ValueKind.SET, ValueKind.UNION}
_AS_A_LIST = {ValueKind.LIST, ValueKind.SET}
Ask = Callable[[str, str], Verdict]


class MathGrader:
    """Compares answers: numbers, lists and intervals exactly, formulas symbolically.

    Its methods may be called by many threads at once, and none of them uses a signal of this
    process. Symbolic comparisons happen in helper processes, which are started when an answer needs
    one; `close` ends them, so an environment hands it to `on_close`. A comparison that takes more
    than `cpu_limit_s` seconds of processor time is not gradable.
    """

    def __init__(self, *, max_helpers: int = 2, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._helpers = Helpers(max_helpers=max_helpers, cpu_limit_s=cpu_limit_s)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[tuple[str, str], Future[Verdict]] = OrderedDict()

    def are_equal(self, answer: str, right: str) -> bool:
        """Return whether `answer` has the same value as `right`."""
        return self.compare(answer, right) is Verdict.EQUAL

    def compare(self, answer: str, right: str) -> Verdict:
        """Return whether `answer` has the same value as `right`, or cannot be read.

        An empty answer is no answer, and different.
        """
        key = (answer, right)
        with self._lock:
            known = self._verdicts.get(key)
            verdict = known or Future[Verdict]()
            self._verdicts[key] = verdict
            if len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            verdict.set_result(_compared(answer, right, self._ask))
        finally:
            if not verdict.done():
                with self._lock:
                    self._verdicts.pop(key, None)
                verdict.cancel()
        return verdict.result()

    def close(self) -> None:
        """End the helper processes."""
        self._helpers.close()

    def _ask(self, answer: str, right: str) -> Verdict:
        if not is_worth_comparing(answer):
            return Verdict.UNREADABLE
        return self._helpers.compare(answer, right)


def numbers_match(answer: str, right: str) -> bool:
    """Return whether `answer` is a number, not a calculation, with the same value as `right`.

    Both are read as `MathGrader` reads them.
    """
    value, right_value = _unnamed(read_value(answer)), _unnamed(read_value(right))
    if not isinstance(value, Amount) or not isinstance(right_value, Amount):
        return False
    is_finished = not value.is_quotient or value.value.denominator > 1
    return is_finished and value.equals(right_value)


def _compared(answer: str, right: str, ask: Ask) -> Verdict:
    if not answer.strip():
        return Verdict.DIFFERENT
    letter = _CHOICE.fullmatch(normalized(right)) if len(right) < MAX_CHARACTERS else None
    if letter and letter[1] == choice_of(answer):
        return Verdict.EQUAL
    value, right_value = read_value(answer), read_value(right)
    if value == right_value:
        is_empty = isinstance(value, Unreadable) and not value.text
        return Verdict.UNREADABLE if is_empty else Verdict.EQUAL
    return _values(value, right_value, ask)


def _unnamed(value: Value) -> Value:
    return value.value if isinstance(value, Named) else value


def _values(value: Value, right: Value, ask: Ask) -> Verdict:
    if isinstance(value, Named) and isinstance(right, Named):
        if value.name != right.name:
            return Verdict.DIFFERENT
    elif Formula in (type(value), type(right)) and Named in (type(value), type(right)):
        # An equation about more than one name, which may say the same: y = 2x + 3 and 2x - y = -3.
        formula = value if isinstance(value, Formula) else right
        if isinstance(formula, Formula) and "=" in formula.body:
            return ask(value.text, right.text)
    value, right = _unnamed(value), _unnamed(right)
    if isinstance(value, Unreadable) or isinstance(right, Unreadable):
        is_known = isinstance(right, Words) or isinstance(value, Words)
        return Verdict.DIFFERENT if is_known else Verdict.UNREADABLE
    if isinstance(value, Amount) and isinstance(right, Amount):
        return Verdict.EQUAL if value.equals(right) else Verdict.DIFFERENT
    if isinstance(value, Words) or isinstance(right, Words):
        texts = [one.text.strip("() ").replace("-", " ").casefold() for one in (value, right)]
        return Verdict.EQUAL if texts[0] == texts[1] else Verdict.DIFFERENT
    if isinstance(value, Grouped) or isinstance(right, Grouped):
        return _groups(value, right, ask)
    return _formulas(value, right, ask)


def _formulas(value: Value, right: Value, ask: Ask) -> Verdict:
    """Compare two values of which at least one is a formula and none is a group."""
    for one, other in ((value, right), (right, value)):
        if isinstance(one, Formula) and isinstance(other, Amount) and not one.is_numeric:
            # A variable is no number, unless it cancels out; an unknown command may hide one.
            if not one.has_variables:
                return Verdict.UNREADABLE
            if not may_cancel(one.body):
                return Verdict.DIFFERENT
    units = [one.unit for one in (value, right) if isinstance(one, (Amount, Formula))]
    if None not in units and units[0] != units[1]:
        return Verdict.DIFFERENT
    texts = [_tex(value), _tex(right)]
    orders = [_CAPITALS.fullmatch(re.sub("[ {}]", "", text)) for text in texts]
    if orders[0] and orders[1]:
        # An order, such as a ranking, and no product; an angle may be read from either side.
        is_angle = orders[0][1] or orders[1][1]
        same = {orders[1][2], orders[1][2][::-1] if is_angle else ""}
        return Verdict.EQUAL if orders[0][2] in same else Verdict.DIFFERENT
    return ask(*texts)


def _tex(value: Value) -> str:
    if isinstance(value, Amount):
        return f"\\frac{{{value.value.numerator}}}{{{value.value.denominator}}}"
    return value.body if isinstance(value, Formula) else value.text


def _groups(value: Value, right: Value, ask: Ask) -> Verdict:
    """Compare two values of which at least one is a group."""
    value, right = _listed(value, right), _listed(right, value)
    if not isinstance(value, Grouped) or not isinstance(right, Grouped):
        group, other = (value, right) if isinstance(value, Grouped) else (right, value)
        if isinstance(group, Grouped) and group.kind in _AS_A_LIST and len(group.members) == 1:
            return _values(group.members[0], other, ask)
        says_more = isinstance(other, Formula) and ("\\" in other.body or other.has_variables)
        return ask(_tex(value), _tex(right)) if says_more else Verdict.DIFFERENT
    kinds = {value.kind, right.kind}
    # Values that have names are in any order, whatever brackets are around them.
    both = (*value.members, *right.members)
    has_names = bool(both) and all(isinstance(one, Named) for one in both)
    in_any_order = kinds <= _ANY_ORDER or (has_names and kinds <= {ValueKind.LIST, ValueKind.OPEN})
    without_brackets = ValueKind.LIST in kinds and kinds <= {
        ValueKind.LIST,
        ValueKind.OPEN,
        ValueKind.CLOSED,
    }
    if not in_any_order and not without_brackets and len(kinds) > 1:
        return Verdict.DIFFERENT
    members: Sequence[Value] = value.members
    rights: Sequence[Value] = right.members
    if in_any_order and ValueKind.SET in kinds:
        # A set has each member once, so that a list of it may repeat some.
        members, rights = distinct(members), distinct(rights)
    return _members(members, rights, ask, in_any_order=in_any_order)


def _listed(value: Value, other: Value) -> Value:
    """Return a number such as `1,234` as the list that it may also be, if the other is a list."""
    if isinstance(value, Amount) and isinstance(other, Grouped) and other.kind in _AS_A_LIST:
        parts = split_list(value.text, groups=False)
        if len(parts) == len(other.members) > 1:
            members = tuple(read_value(part) for part in parts)
            return Grouped(kind=ValueKind.LIST, members=members, text=value.text)
    return value


def _members(
    values: Sequence[Value], rights: Sequence[Value], ask: Ask, *, in_any_order: bool
) -> Verdict:
    if len(values) != len(rights):
        return Verdict.DIFFERENT
    left = list(rights)
    verdict = Verdict.EQUAL
    for value in values:
        for at, right in enumerate(left if in_any_order else left[:1]):
            verdict = Verdict.EQUAL if value == right else _values(value, right, ask)
            if verdict is Verdict.UNREADABLE:
                return verdict
            if verdict is Verdict.EQUAL:
                del left[at]
                break
        if verdict is not Verdict.EQUAL:
            return verdict
    return Verdict.EQUAL
