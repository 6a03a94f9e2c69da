"""`Helpers`: processes that compare formulas, started on demand, killed when a pair takes too long.

Threads cannot be stopped and signals reach only the main thread, so a comparison that may take
minutes has to run in another process. Several threads may call `compare` at once; each uses one
process while it waits.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from telescope_core.base.errors import EnvironmentLoadError, ProcessDiedError
from telescope_core.graders.mathematics.comparing import CPU_LIMIT_SIGNAL, Verdict

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
    """At most `max_helpers` processes; each compares one pair at a time."""

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
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
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
