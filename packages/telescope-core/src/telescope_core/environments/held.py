"""Find the code that blocks or ended a process, in memory that the process shares.

    beats, exit, turns, loop | slot: thread, call, since, until, text | slot | ...

Run as a file, this is the watcher of a driver: `python -I -S held.py MEMORY GUARD PID`. It imports
nothing of Telescope, so that it is small and ready at once. It says whose code has held the
interpreter, or the event loop, beyond the deadline of its rollout, and ends the driver: nothing
inside the driver can.
"""

import mmap
import os
import select
import signal
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BEATS = struct.Struct("<Q")
EXIT = struct.Struct("<?q")
EXIT_AT = 8
TURNS = struct.Struct("<Qq")
TURNS_AT = 24
SLOT = struct.Struct("<?qqdd216s")
HEAD_BYTES = 64
NUM_SLOTS = 256
"""Calls that can be noted at once; the watcher does not see further ones."""
MEMORY_BYTES = HEAD_BYTES + NUM_SLOTS * SLOT.size
TEXT_BYTES = 216
_BUSY_SHARE = 0.5
"""Share of the time between two looks; a thread that computes for longer holds the interpreter."""
_CRASHES = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV: signals that a process gets for its own faults."""
_LOOK_EVERY_S = 0.5
_HELD_AFTER_S = 2.0
_GRACE_S = 5.0
"""Seconds after the deadline in which the driver may end the code by itself."""


@dataclass(frozen=True)
class Noted:
    """A call that had begun and not ended when the memory was read."""

    thread: int
    """Number of its thread in the operating system."""
    call: int
    """Number of the request that it belongs to."""
    since_s: float
    """Start of the call, on the monotonic clock of the machine."""
    until_s: float
    """Deadline of its rollout, on the same clock."""
    text: str
    """Role, `method (file:line)`, and the rollout that it runs for."""


class Watched:
    """The shared memory as the watching process reads it, with the threads of the watched one."""

    def __init__(self, memory: mmap.mmap, pid: int) -> None:
        self._memory = memory
        self._pid = pid
        self._beats = 0
        self._moved_s = self._looked_s = time.monotonic()
        self._turns = 0
        self._turned_s = self._moved_s
        self._seconds: dict[int, float] = {}
        self._busy: set[int] = set()

    def still_s(self) -> float:
        """Return the seconds without a sign of the interpreter; 0 before its first sign."""
        now_s = time.monotonic()
        (beats,) = BEATS.unpack_from(self._memory, 0)
        if beats != self._beats or not beats:
            self._beats, self._moved_s, self._seconds = beats, now_s, {}
            return 0.0
        since_s, self._looked_s = now_s - self._looked_s, now_s
        before, self._seconds = self._seconds, _thread_seconds(self._pid)
        self._busy = {
            thread
            for thread, seconds in self._seconds.items()
            if seconds - before.get(thread, seconds) > _BUSY_SHARE * since_s > 0
        }
        return now_s - self._moved_s

    def blocker(self) -> tuple[Noted | None, float]:
        """Return the call that blocks the event loop, and for how many seconds it has done so."""
        turns, thread = TURNS.unpack_from(self._memory, TURNS_AT)
        now_s = time.monotonic()
        if turns != self._turns or not turns or _state(self._pid) in "Tt":
            self._turns, self._turned_s = turns, now_s
        calls = [one for one in self.running() if one.thread == thread]
        return (calls[0] if calls else None), now_s - self._turned_s

    def running(self) -> list[Noted]:
        """Return the innermost noted call of each thread, the oldest first."""
        calls: dict[int, Noted] = {}
        for number in range(NUM_SLOTS):
            is_used, thread, call, since_s, until_s, text = SLOT.unpack_from(
                self._memory, HEAD_BYTES + number * SLOT.size
            )
            if is_used and (thread not in calls or calls[thread].since_s < since_s):
                shown = text.rstrip(b"\0").decode("utf-8", "replace")
                calls[thread] = Noted(thread, call, since_s, until_s, shown)
        return sorted(calls.values(), key=lambda one: one.since_s)

    def holder(self) -> Noted | None:
        """Return the call that holds the interpreter; None if that is not known.

        If several calls have begun, it is the one whose thread computes, because the others wait
        for it.
        """
        calls = self.running()
        if _state(self._pid) in "Tt":
            return None  # the process is stopped, which is no fault of its code
        busy = [one for one in calls if one.thread in self._busy]
        found = busy if len(busy) == 1 else calls
        return found[0] if len(found) == 1 else None

    def ended_by(self, code: int) -> Noted | None:
        """Return the call that ended the process with exit code `code`; None if that is not known.

        A signal from outside does not mean that the process's code is at fault.
        """
        has_exited, call = EXIT.unpack_from(self._memory, EXIT_AT)
        calls = self.running()
        if has_exited:
            own = [one for one in calls if one.call == call]
            return own[-1] if own else Noted(0, call, 0.0, 0.0, "its code")
        is_crash = code >= 0 or -code in _CRASHES
        return calls[0] if is_crash and len(calls) == 1 else None


def _thread_seconds(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of a process; empty without /proc."""
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            fields = task.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the thread has ended
        seconds[int(task.parent.name)] = (int(fields[11]) + int(fields[12])) / tick
    return seconds


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def watch_driver(memory_fd: int, guard_fd: int, pid: int) -> None:
    """Watch a driver until the pipe behind `guard_fd` closes; print which code ended it."""
    watched = Watched(mmap.mmap(memory_fd, MEMORY_BYTES), pid)
    # Not `select`: the driver's descriptors may be beyond 1023.
    guard = select.poll()
    guard.register(guard_fd, select.POLLIN)
    while not guard.poll(_LOOK_EVERY_S * 1000):
        held_s, (blocker, blocked_s) = watched.still_s(), watched.blocker()
        holder = watched.holder() if held_s > _HELD_AFTER_S else None
        code, still_s, what = holder, held_s, "the interpreter"
        if holder is None and blocked_s > _HELD_AFTER_S:
            code, still_s, what = blocker, blocked_s, "the event loop"
        if code is not None and time.monotonic() > code.until_s + _GRACE_S:
            sys.stderr.write(
                f"\nerror: {code.text} has held {what}, and with it all of this process, for "
                f"{still_s:.0f} s, beyond its deadline; nothing inside can end it, so the process "
                "is ended. Play the environment in processes (env_isolation auto or process), "
                "where it costs its own rollout, or bound what the code computes\n"
            )
            sys.stderr.flush()
            os.kill(pid, signal.SIGKILL)
            return
    # A driver that ends in order says so before.
    if os.read(guard_fd, 1):
        return
    exited = watched.ended_by(0)
    if exited is not None:
        sys.stderr.write(
            f"\nerror: the process ended while {exited.text} ran: by os._exit, a crash of native "
            "code, or a signal from outside. In processes (env_isolation auto or process) it would "
            "have cost its own rollout\n"
        )


if __name__ == "__main__":
    watch_driver(*map(int, sys.argv[1:4]))
