"""Which code of authors runs at this moment, in memory that another process reads.

A process whose interpreter is held, or that has ended, cannot tell what it was doing. So each call
of an author's code is noted before it begins, in memory that is shared with the process that
watches this one: the keeper of a worker, or the watcher of a driver.

    beats, exit note | slot: thread, call, since, text | slot | ...

A note costs about a microsecond. Only calls on behalf of a request are noted (`CURRENT`).
"""

import mmap
import os
import struct
import time
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from types import TracebackType
from typing import Any, Generic, TypeVar

from telescope_core.code_places import location_of

Result = TypeVar("Result")
_BEATS = struct.Struct("<Q")
_EXIT = struct.Struct("<?q")
_SLOT = struct.Struct("<?qqd224s")
_HEAD_BYTES = 64
_NUM_SLOTS = 256
"""Calls that are noted at a time; those beyond them are not known to the watcher."""
MEMORY_BYTES = _HEAD_BYTES + _NUM_SLOTS * _SLOT.size
_TEXT_BYTES = 224
_BUSY_SHARE = 0.5
"""Of the time between two looks: a thread that computes for as long holds the interpreter."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A call that had begun and not ended when the memory was read."""

    thread: int
    """Its number in the operating system."""
    call: int
    """Number of the request that it belongs to."""
    since_s: float
    """On the monotonic clock of the machine."""
    text: str
    """Role, `method (file:line)`, and what it is played for."""


class Notes:
    """The memory, for the process whose calls are noted."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """`memory`: `MEMORY_BYTES` of zeros that are shared; None = shared with forks alone."""
        self.memory = memory if memory is not None else mmap.mmap(-1, MEMORY_BYTES)
        self._free = list(range(_NUM_SLOTS - 1, -1, -1))
        self._beats = 0

    def beat(self) -> None:
        """Show that the interpreter runs."""
        self._beats += 1
        _BEATS.pack_into(self.memory, 0, self._beats)

    def begin(self, call: int, text: bytes) -> int:
        """Note that code begins; returns what `end` is to be given."""
        try:
            number = self._free.pop()
        except IndexError:
            return -1
        place = _HEAD_BYTES + number * _SLOT.size
        _SLOT.pack_into(
            self.memory, place, True, get_native_id(), call, time.monotonic(), text[:_TEXT_BYTES]
        )
        return number

    def end(self, number: int) -> None:
        """Note that the code has ended."""
        if number >= 0:
            self.memory[_HEAD_BYTES + number * _SLOT.size] = 0
            self._free.append(number)

    def watch_exits(self) -> None:
        """Note from now on which call ends this process by `os._exit`, which nothing can catch."""
        leave, own = os._exit, os.getpid()

        def noted(status: int) -> Any:
            current = CURRENT.get()
            # Forks share the memory, and end in this way whenever they have done their work.
            if current is not None and os.getpid() == own:
                _EXIT.pack_into(self.memory, _BEATS.size, True, current.call)
            leave(status)

        os._exit = noted


@dataclass(frozen=True, slots=True)
class Request:
    """The request that the running code belongs to."""

    notes: Notes
    call: int
    """Its number."""
    played: str = ""
    """For what the code runs, such as a rollout; empty where whoever watches knows the number."""


CURRENT: ContextVar[Request | None] = ContextVar("telescope_running", default=None)


class noting:
    """Note in the block that `method` runs, whose role is `what`; for sync code."""

    __slots__ = ("_notes", "_number")

    def __init__(self, method: object, what: str) -> None:
        request = CURRENT.get()
        self._notes: Notes | None = None
        if request is not None:
            self._notes = request.notes
            self._number = request.notes.begin(request.call, _text(method, what, request.played))

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._notes is not None:
            self._notes.end(self._number)


def noted(awaitable: Awaitable[Result], method: object, what: str) -> Awaitable[Result]:
    """Return `awaitable`, each of whose steps is noted as `noting` does."""
    request = CURRENT.get()
    if request is None:
        return awaitable
    return _Steps(awaitable, request, _text(method, what, request.played))


class _Steps(Generic[Result]):
    def __init__(self, awaitable: Awaitable[Result], request: Request, text: bytes) -> None:
        self._awaitable = awaitable
        self._request = request
        self._text = text

    def __await__(self) -> Generator[Any, None, Result]:
        notes, call, text = self._request.notes, self._request.call, self._text
        steps: Any = self._awaitable.__await__()
        error: BaseException | None = None
        try:
            while True:
                number = notes.begin(call, text)
                try:
                    waits_for = next(steps) if error is None else steps.throw(error)
                except StopIteration as ended:
                    return ended.value
                finally:
                    notes.end(number)
                try:
                    yield waits_for
                    error = None
                except GeneratorExit:
                    raise
                except BaseException as raised:  # noqa: BLE001 - thrown into the awaited code
                    error = raised
        finally:
            close: Callable[[], None] | None = getattr(steps, "close", None)
            if close is not None:
                close()


_TEXTS: dict[tuple[object, str], str] = {}


def _text(method: object, what: str, played: str) -> bytes:
    plain = getattr(method, "__func__", method)
    place = _TEXTS.get((plain, what))
    if place is None:
        place = f"{what} {location_of(method)}"
        if len(_TEXTS) < 1000:
            _TEXTS[plain, what] = place
    return (f"{place} of {played}" if played else place).encode()


class Watched:
    """The memory, for the process that watches another one, with what that one's threads do."""

    def __init__(self, memory: mmap.mmap, pid: int) -> None:
        self._memory = memory
        self._pid = pid
        self._beats = 0
        self._moved_s = self._looked_s = time.monotonic()
        self._seconds: dict[int, float] = {}
        self._busy: set[int] = set()

    def still_s(self) -> float:
        """Return for how long the interpreter has stood still; 0 before it has begun to beat."""
        now_s = time.monotonic()
        (beats,) = _BEATS.unpack_from(self._memory, 0)
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

    def running(self) -> list[Noted]:
        """Return the innermost noted call of each thread, the oldest first."""
        calls: dict[int, Noted] = {}
        for number in range(_NUM_SLOTS):
            is_used, thread, call, since_s, text = _SLOT.unpack_from(
                self._memory, _HEAD_BYTES + number * _SLOT.size
            )
            if is_used and (thread not in calls or calls[thread].since_s < since_s):
                shown = text.rstrip(b"\0").decode("utf-8", "replace")
                calls[thread] = Noted(thread, call, since_s, shown)
        return sorted(calls.values(), key=lambda one: one.since_s)

    def holder(self) -> Noted | None:
        """Return the call that holds the interpreter; None if that is not known.

        Of several that have begun, it is the one whose thread computes: the others wait for it.
        """
        calls = self.running()
        if _state(self._pid) in "Tt":
            return None  # the process is stopped, which is no fault of its code
        busy = [one for one in calls if one.thread in self._busy]
        found = busy if len(busy) == 1 else calls
        return found[0] if len(found) == 1 else None

    def ended_by(self, code: int) -> Noted | None:
        """Return the call that has ended the process with `code`; None if that is not known.

        A signal that ends a process from outside says nothing of its code.
        """
        has_exited, call = _EXIT.unpack_from(self._memory, _BEATS.size)
        calls = self.running()
        if has_exited:
            own = [one for one in calls if one.call == call]
            return own[-1] if own else Noted(0, call, 0.0, "its code")
        is_crash = code >= 0 or -code in _CRASHES
        return calls[0] if is_crash and len(calls) == 1 else None


_CRASHES = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV: what a process does to itself."""


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
