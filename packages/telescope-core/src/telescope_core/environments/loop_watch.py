"""`LoopWatch`: detects that code blocks an event loop, and finds that code.

The loop updates a heartbeat, which a thread checks. When the heartbeat stops, the thread reads the
stack of the loop's thread. The culprit is the innermost frame of the author's code. Code that
blocks the loop until the deadline of a rollout is interrupted, and Ctrl-C, or another signal that
asks the process to end, interrupts it at once.
"""

import asyncio
import ctypes
import linecache
import logging
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from telescope_core.base.code_places import libraries, shown_path
from telescope_core.base.interrupts import NUMBERS

_log = logging.getLogger(__name__)
_EVENTS = asyncio.events.__file__
"""File of the frame that runs the loop's callbacks."""
_WAITING: object = vars(asyncio.BaseEventLoop)["_run_once"].__code__
"""Code of the loop itself: without a frame of `_EVENTS` further in, it waits for work."""
_TOLD_AFTER_S = 5.0
_MOST_CALLS = 5
"""Most lines of a warning for the calls in which the event loop was blocked."""
_AGAIN_AFTER_S = 1.0
"""Seconds after which an interrupt that the author's code caught is sent again."""


class LoopBlockedError(TimeoutError):
    """Raised in code that has blocked the event loop until the deadline of a rollout."""

    def __str__(self) -> str:
        """Return advice; Python raises the class in another thread, without arguments."""
        return (
            "the environment's code blocked the event loop until the rollout's deadline; make it "
            "sync so that it runs in a thread, await what it waits for, or declare it "
            '@runs_in("process")'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One period in which some code blocked an event loop."""

    duration_s: float
    """Seconds for which the event loop was blocked."""
    culprit: str
    """`function (file:line)` of the innermost frame of the author's code."""
    stack: str
    """The calls from the author's code inwards when the block was noticed, a line each."""


class LoopWatch:
    """Watches the running event loop between `start` and `stop`.

    Only code in `own_folder`, the folder of the author's code, is reported. Without `own_folder`,
    any code outside Python's standard library and Telescope is. A block is reported when it lasts
    longer than `threshold_s` seconds.
    """

    def __init__(
        self,
        *,
        own_folder: str = "",
        threshold_s: float = 0.2,
        on_block: Callable[[Block], None] | None = None,
    ) -> None:
        self._own_folder = own_folder
        self._threshold_s = threshold_s
        self._on_block = on_block or _Warnings().warn
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat_s = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self.longest_s = 0.0
        """Longest delay of a heartbeat so far, in seconds."""
        self.deadline_s: float | None = None
        """After blocking this long, code is interrupted; None = never."""
        self._previous_handlers: dict[int, Any] = {}
        self._asked_at_s = 0.0
        """Time of the signal to end the process; a block that had just begun ends once it is
        noticed."""
        self._asked_by = signal.SIGINT

    def start(self) -> None:
        """Start watching the running loop; a second call has no effect."""
        if self._thread is not None:
            return
        loop = asyncio.get_running_loop()
        self._beat_s = time.monotonic()
        self._stopped.clear()
        self._schedule(loop)
        self._thread = threading.Thread(
            target=self._watch, args=(loop, threading.get_ident()), name="loop-watch", daemon=True
        )
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in NUMBERS}
            self._previous_handlers = {one: by for one, by in handlers.items() if callable(by)}
            for number in self._previous_handlers:
                signal.signal(number, self._on_signal)

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stopped.set()
        if self._handle is not None:
            self._handle.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for number, handler in self._previous_handlers.items():
            found: Any = signal.getsignal(number)
            if found == self._on_signal:
                signal.signal(number, handler)
            # A watch that was started later hands its signals on to what this one replaced.
            while isinstance(later := getattr(found, "__self__", None), LoopWatch):
                found = later._previous_handlers[number]
                if found == self._on_signal:
                    later._previous_handlers[number] = handler

    @property
    def _period_s(self) -> float:
        return self._threshold_s / 4

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = loop.call_later(self._period_s, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - self._beat_s - self._period_s)
        self._beat_s = now_s
        self._schedule(loop)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """End blocking code at once; a loop that runs can end its tasks in order."""
        is_blocked = not self._stopped.is_set() and self._late_s > self._threshold_s
        is_again = self._asked_at_s > self._beat_s
        self._asked_at_s, self._asked_by = time.monotonic(), signal.Signals(number)
        if not is_again:
            self._previous_handlers[number](number, frame)
        if is_blocked:
            raise KeyboardInterrupt

    @property
    def _late_s(self) -> float:
        return time.monotonic() - self._beat_s - self._period_s

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        suspect: FrameType | None = None
        blocked: Block | None = None
        ending = _Ending(loop_thread)
        while not self._stopped.wait(self._period_s) and loop.is_running():
            late_s = self._late_s
            if late_s <= self._threshold_s / 2:
                if blocked is not None:
                    self._on_block(blocked)
                suspect = blocked = None
                ending = _Ending(loop_thread)
                continue
            # An overloaded machine also delays the heartbeat, but then two checks in a row do not
            # find the same frame.
            earlier, suspect = suspect, self._author(loop_thread)
            if blocked is not None:
                blocked = replace(blocked, duration_s=late_s)
                if self._asked_at_s > self._beat_s:
                    interrupt_main(self._asked_by)
                elif suspect is not None:
                    ending.of(blocked, deadline_s=self.deadline_s)
            elif late_s > self._threshold_s and suspect is not None and suspect is earlier:
                blocked = _block(suspect, late_s, sys._current_frames().get(loop_thread))  # pyright: ignore[reportPrivateUsage]
        if blocked is not None:
            self._on_block(blocked)

    def _author(self, loop_thread: int) -> FrameType | None:
        """Return the innermost frame of the author's code in the loop's current callback, or None.

        Frames outside the callback, such as the script that runs the loop, do not block it. None is
        running where the loop waits, which takes long if the machine does not go on with it.
        """
        frame = sys._current_frames().get(loop_thread)  # pyright: ignore[reportPrivateUsage]
        author: FrameType | None = None
        while frame is not None and frame.f_code.co_filename != _EVENTS:
            if frame.f_code is _WAITING:
                return None
            file = frame.f_code.co_filename
            is_own = file.startswith(self._own_folder) and not file.startswith(libraries())
            if author is None and is_own:
                author = frame
            frame = frame.f_back
        return author


class _Ending:
    """Warns of one block while it lasts, and interrupts it at the deadline."""

    def __init__(self, loop_thread: int) -> None:
        self._loop_thread = loop_thread
        self._is_told = False
        self._interrupt_at_s = 0.0

    def of(self, block: Block, *, deadline_s: float | None) -> None:
        if not self._is_told and block.duration_s > _TOLD_AFTER_S:
            self._is_told = True
            end = "" if deadline_s is None else f" It is interrupted after {deadline_s:g} s."
            _log.warning(
                "%s has blocked the event loop, and with it every rollout, for %.0f s, and still "
                "does.%s Ctrl-C ends it now.",
                block.culprit,
                block.duration_s,
                end,
            )
        if deadline_s is None or block.duration_s < max(deadline_s, self._interrupt_at_s):
            return
        self._interrupt_at_s = block.duration_s + _AGAIN_AFTER_S
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._loop_thread), ctypes.py_object(LoopBlockedError)
        )


def _block(author: FrameType, late_s: float, innermost: FrameType | None) -> Block:
    name, file = author.f_code.co_name, shown_path(author.f_code.co_filename)
    return Block(
        duration_s=late_s,
        culprit=f"{name} ({file}:{_line_of(author)})",
        stack=_calls(author, innermost),
    )


def _calls(author: FrameType, innermost: FrameType | None) -> str:
    """Return the calls from the author's code inwards, a line each, `_MOST_CALLS` at most."""
    lines: list[str] = []
    frame = innermost
    while frame is not None:
        code = frame.f_code
        line = _line_of(frame)
        text = linecache.getline(code.co_filename, line).strip()
        place = f"{shown_path(code.co_filename)}:{line} in {code.co_name}"
        lines.append(f"  {place}: {text}" if text else f"  {place}")
        if frame is author:
            break
        frame = frame.f_back
    lines.reverse()
    if len(lines) > _MOST_CALLS:
        left_out = len(lines) - _MOST_CALLS + 1
        lines[_MOST_CALLS - 2 : -1] = [f"  ... {left_out} more calls"]
    return "\n".join(lines)


def _line_of(frame: FrameType) -> int:
    """Return the current line of `frame`, or the first line of its code if it has none.

    Between two lines, at instructions that the compiler added, a frame has no line.
    """
    line: int | None = frame.f_lineno
    return frame.f_code.co_firstlineno if line is None else line


class _Warnings:
    """Logs each culprit once in full, and later only the number of its blocks."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def warn(self, block: Block) -> None:
        self._seen[block.culprit] += 1
        times = self._seen[block.culprit]
        if times == 1:
            _log.warning(
                "%s blocked the event loop, and with it every rollout, for %.2f s; make it sync so "
                "that it runs in a thread, await what it waits for, or declare it "
                '@runs_in("process")\n%s',
                block.culprit,
                block.duration_s,
                block.stack,
            )
        elif times & (times - 1) == 0:
            _log.warning("%s blocked the event loop %d times", block.culprit, times)
