"""Note which of an author's code is running, in memory that another process reads.

A process whose interpreter is blocked, or that has ended, cannot report its running code. So each
call of an author's code is noted before it begins, in memory that is shared with the process that
watches this one: the supervisor of a worker, or the watcher of a driver.

A note costs about a microsecond. Only calls on behalf of a request are noted (`CURRENT`). The
module `held` has the form of the memory, and reads it.
"""

import asyncio
import math
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import get_native_id
from types import TracebackType
from typing import Any, Generic, TypeVar

from telescope_core.base.code_places import location_of
from telescope_core.environments.held import (
    BEATS,
    EXIT,
    EXIT_AT,
    HEAD_BYTES,
    MEMORY_BYTES,
    NUM_SLOTS,
    SLOT,
    TEXT_BYTES,
    TURNS,
    TURNS_AT,
)

Result = TypeVar("Result")
_SHOWN_EVERY_S = 0.2
"""Seconds between two signs of life of a watched driver."""


class Notes:
    """The shared memory as the watched process writes it."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """`memory`: `MEMORY_BYTES` of shared zeros; None = new memory, shared with forks only."""
        self.memory = memory if memory is not None else mmap.mmap(-1, MEMORY_BYTES)
        self._free = list(range(NUM_SLOTS - 1, -1, -1))
        self._beats = self._turns = 0

    def beat(self) -> None:
        """Write a sign that the interpreter runs."""
        self._beats += 1
        BEATS.pack_into(self.memory, 0, self._beats)

    def turn(self) -> None:
        """Write a sign that the event loop runs; called on the thread of the loop."""
        self._turns += 1
        TURNS.pack_into(self.memory, TURNS_AT, self._turns, get_native_id())

    def begin(self, request: "Request", text: bytes) -> int:
        """Note that code begins to run; returns the argument for `end`."""
        try:
            number = self._free.pop()
        except IndexError:
            return -1
        place = HEAD_BYTES + number * SLOT.size
        SLOT.pack_into(
            self.memory,
            place,
            True,
            get_native_id(),
            request.call,
            time.monotonic(),
            request.until_s,
            text[:TEXT_BYTES],
        )
        return number

    def end(self, number: int) -> None:
        """Note that the code has ended."""
        if number >= 0:
            self.memory[HEAD_BYTES + number * SLOT.size] = 0
            self._free.append(number)


@dataclass(frozen=True, slots=True)
class Request:
    """The request that the running code belongs to."""

    notes: Notes
    call: int
    """Its number."""
    played: str = ""
    """Description of the rollout or other task that the code runs for; empty if the watcher knows
    the number."""
    until_s: float = math.inf
    """Deadline on the monotonic clock; inf if the watcher knows it."""


CURRENT: ContextVar[Request | None] = ContextVar("telescope_running", default=None)


class NotedExit:
    """`os._exit`, which cannot be caught, but notes the request that calls it."""

    def __init__(self) -> None:
        former: Any = os._exit
        self._leave = former._leave if isinstance(former, NotedExit) else former
        self._own = os.getpid()

    def __call__(self, status: int) -> Any:
        """Note it, and end the process."""
        current = CURRENT.get()
        # Forks share the memory, and end in this way whenever they have done their work.
        if current is not None and os.getpid() == self._own:
            EXIT.pack_into(current.notes.memory, EXIT_AT, True, current.call)
        self._leave(status)


class noting:
    """Context manager for sync code: note that `method` runs, whose role is `what`."""

    __slots__ = ("_notes", "_number")

    def __init__(self, method: object, what: str, request: Request | None = None) -> None:
        """`request`: the one that it belongs to; None = the current one, if there is one."""
        request = request or CURRENT.get()
        self._notes: Notes | None = None
        if request is not None:
            self._notes = request.notes
            self._number = request.notes.begin(request, _text(method, what, request.played))

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
    """Return `awaitable` wrapped so that each of its steps is noted, as `noting` does."""
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
        notes, request, text = self._request.notes, self._request, self._text
        steps: Any = self._awaitable.__await__()
        error: BaseException | None = None
        try:
            while True:
                number = notes.begin(request, text)
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


class HoldWatch:
    """Starts a process that watches this one, which runs authors' code, from `start` to `stop`.

    Code that blocks the interpreter here, or the running loop for good, ends this process; the
    watcher reports whose code it was.
    """

    def __init__(self) -> None:
        self._notes: Notes | None = None
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = -1
        self._turning: asyncio.TimerHandle | None = None

    def start(self) -> Notes:
        """Start the watcher once, on the running loop; returns the memory to note calls in."""
        if self._notes is not None:
            return self._notes
        with tempfile.TemporaryFile() as file:
            file.truncate(MEMORY_BYTES)
            notes = Notes(mmap.mmap(file.fileno(), MEMORY_BYTES))
            guard_read, guard = os.pipe()
            fds = (file.fileno(), guard_read)
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("held.py"))]
            try:
                self._process = subprocess.Popen(
                    [*command, *map(str, fds), str(os.getpid())],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the driver, which says that it ended
                )
            except BaseException:
                os.close(guard)
                raise
            finally:
                os.close(guard_read)
        self._notes, self._guard = notes, guard
        os._exit = NotedExit()
        # Before the thread does: what holds the interpreter from now on is seen.
        notes.beat()
        threading.Thread(target=self._beat, args=(notes,), name="hold-watch", daemon=True).start()
        self._turn(notes, asyncio.get_running_loop())
        return notes

    def stop(self) -> None:
        """End the watcher. Idempotent."""
        self._stopped.set()
        if self._turning is not None:
            self._turning.cancel()
        process, self._process = self._process, None
        if process is not None:
            with suppress(BrokenPipeError):  # somebody may have killed it
                os.write(self._guard, b".")
            os.close(self._guard)
            process.wait()

    def _beat(self, notes: Notes) -> None:
        while not self._stopped.wait(_SHOWN_EVERY_S):
            notes.beat()

    def _turn(self, notes: Notes, loop: asyncio.AbstractEventLoop) -> None:
        notes.turn()
        self._turning = loop.call_later(_SHOWN_EVERY_S, self._turn, notes, loop)
