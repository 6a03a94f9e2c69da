"""Measure how long a thread waited for a processor, which a busy machine adds to other times."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from telescope_core.environments.loop_watch import Block

_BEAT_S = 0.01
_NUM_BEATS = 2000
_LOOK_S = 0.005
_LONGEST_LOOK_S = 8 * _LOOK_S
_SLEEPS = ("S", "D")
"""States in which a thread waits for something other than a processor."""


class WaitClock:
    """Reads the kernel's record of how long the calling thread waited; zero if there is none."""

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._beats: deque[tuple[float, float]] = deque(maxlen=_NUM_BEATS)
        self._looks: _Looks | None = None
        self._is_stopped = False

    def waited_s(self) -> float:
        """Return the seconds since its start for which the thread was ready but did not run."""
        try:
            return int(self._path.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def start(self) -> None:
        """Take readings on the running event loop of the thread until `stop`."""
        if self._path.exists():
            self._beat()
        else:
            self._looks = _Looks()

    def stop(self) -> None:
        """Take no more readings. Idempotent."""
        self._is_stopped = True
        if self._looks is not None:
            self._looks.stop()

    def own_s(self, block: Block) -> float:
        """Return the seconds that a block which just ended took, without the time it waited."""
        began_s = time.monotonic() - block.duration_s - 2 * _BEAT_S
        if self._looks is not None:
            return min(block.duration_s, own_time_s(self._looks.since(began_s)))
        before = [waited for moment, waited in list(self._beats) if moment <= began_s]
        if not before:
            return block.duration_s
        return block.duration_s - (self.waited_s() - before[-1])

    def _beat(self) -> None:
        if not self._is_stopped:
            self._beats.append((time.monotonic(), self.waited_s()))
            asyncio.get_running_loop().call_later(_BEAT_S, self._beat)


class Look(NamedTuple):
    """A thread at one moment: the time that it has spent, and its state."""

    at_s: float
    spent_s: float
    """Processor time of the thread so far."""
    state: str
    """The kernel's letter: R runs or waits for a processor, S and D wait for something else."""


def own_time_s(looks: Sequence[Look]) -> float:
    """Return the seconds that a thread certainly computed or slept between samples of it.

    The rest may be waits for a processor. The sampling thread may have to wait for one too, so
    nothing is known about the time between two samples that are far apart.
    """
    own_s = 0.0
    for before, after in pairwise(looks):
        passed_s, spent_s = after.at_s - before.at_s, after.spent_s - before.spent_s
        slept = before.state in _SLEEPS and after.state in _SLEEPS
        own_s += passed_s if slept and passed_s <= _LONGEST_LOOK_S else min(spent_s, passed_s)
    return own_s


class _Looks:
    """Samples the calling thread every few milliseconds, for kernels that keep no record."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._found: deque[Look] = deque(maxlen=_NUM_BEATS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looks", daemon=True)
        self._thread.start()

    def since(self, began_s: float) -> list[Look]:
        """Return the samples since `began_s`."""
        return [look for look in list(self._found) if look.at_s >= began_s]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            at_s, spent_s = time.monotonic(), time.clock_gettime(self._clock)
            self._found.append(Look(at_s, spent_s, self._state()))

    def _state(self) -> str:
        try:
            # The name of the thread comes before it, in brackets, and may hold anything.
            return self._stat.read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
