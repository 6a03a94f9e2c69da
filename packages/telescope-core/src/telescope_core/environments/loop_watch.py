"""`LoopWatch`: finds out when code blocks an event loop, and which code it is.

A thread looks at a heartbeat that the loop itself keeps. When it stops, the thread reads the
stack of the loop's thread: the culprit is the innermost frame that is the author's.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from telescope_core.environments.calls import shown_path

_log = logging.getLogger(__name__)
_LIBRARIES = (str(Path(asyncio.__file__).parents[1]), str(Path(__file__).parents[1]))
"""Python's own modules and this package: they only pass a call on."""
_EVENTS = asyncio.events.__file__
"""Where the loop calls back from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One time in which an event loop did nothing else."""

    duration_s: float
    culprit: str
    """`function (file:line)` of the innermost frame outside libraries."""
    stack: str
    """The whole stack at the time it was noticed, outermost frame first."""


class LoopWatch:
    """Watches the running event loop between `start` and `stop`.

    `own_folder` is where the author's code is, which alone is accused; without it, any code that
    is neither Python's nor Telescope's.
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
        """The longest time so far between a heartbeat's due time and the heartbeat."""

    def start(self) -> None:
        """Begin to watch the running loop; a second call has no effect."""
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

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stopped.set()
        if self._handle is not None:
            self._handle.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

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

    def _watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        suspect: FrameType | None = None
        blocked: Block | None = None
        while not self._stopped.wait(self._period_s) and loop.is_running():
            late_s = time.monotonic() - self._beat_s - self._period_s
            if late_s <= self._threshold_s / 2:
                if blocked is not None:
                    self._on_block(blocked)
                suspect = blocked = None
                continue
            # A machine with too much to do delays the heartbeat as well. Then it is never the same
            # call that is found on two looks.
            earlier, suspect = suspect, self._author(loop_thread)
            if blocked is not None:
                blocked = replace(blocked, duration_s=late_s)
            elif late_s > self._threshold_s and suspect is not None and suspect is earlier:
                blocked = _block(suspect, late_s, sys._current_frames().get(loop_thread))  # pyright: ignore[reportPrivateUsage]
        if blocked is not None:
            self._on_block(blocked)

    def _author(self, loop_thread: int) -> FrameType | None:
        """Return the innermost frame of an author in the loop's callback at hand, if there is one.

        What is outside the callback, such as the script that runs the loop, does not block it.
        """
        frame = sys._current_frames().get(loop_thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code.co_filename != _EVENTS:
            file = frame.f_code.co_filename
            if file.startswith(self._own_folder) and not file.startswith(_LIBRARIES):
                return frame
            frame = frame.f_back
        return None


def _block(author: FrameType, late_s: float, innermost: FrameType | None) -> Block:
    name, file = author.f_code.co_name, shown_path(author.f_code.co_filename)
    return Block(
        duration_s=late_s,
        culprit=f"{name} ({file}:{author.f_lineno})",
        stack="".join(traceback.format_list(traceback.extract_stack(innermost))),
    )


class _Warnings:
    """Warns of each culprit once in full, and counts the rest."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def warn(self, block: Block) -> None:
        self._seen[block.culprit] += 1
        times = self._seen[block.culprit]
        if times == 1:
            _log.warning(
                "%s blocked the event loop for %.2f s, and every rollout with it; make it sync so "
                "that it runs in a thread, await what it waits for, or declare it "
                '@runs_in("process")\n%s',
                block.culprit,
                block.duration_s,
                block.stack,
            )
        elif times & (times - 1) == 0:
            _log.warning("%s blocked the event loop %d times", block.culprit, times)
