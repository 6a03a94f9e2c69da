"""Measure the cost of an environment: its processor time, without the validator's own.

A busy machine makes everything take longer, but it costs no more processor time. So limits that
judge an environment are in processor time; wall time only ends activities that wait forever. A slow
machine gets more of it: `slowness` says how much. Where only the clock can judge, `WaitClock` says
how long a thread waited for a processor.
"""

import argparse
import asyncio
import inspect
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from telescope_core.environments.loop_watch import Block


class Cut(StrEnum):
    """Reason why something was ended early."""

    OWN = "own"
    """The environment used up its processor time."""
    WALL = "wall"
    """It waited, or the machine was too busy, so that nothing can be concluded."""


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@dataclass(slots=True, kw_only=True)
class Meter:
    """Reads the environment's own processor time, in seconds of the reference machine."""

    spent_s: Callable[[], float] = processor_s
    wall_s: Callable[[], float] = time.monotonic
    slowness: float = 1.0
    """Slowness of this machine relative to the one for which limits are set; 1 = equal."""
    _ours_s: float = field(default=0.0, init=False)

    def own_s(self) -> float:
        """Return the seconds spent so far, without the parts marked as the validator's."""
        return (self.spent_s() - self._ours_s) / self.slowness

    @contextmanager
    def ours(self) -> Generator[None]:
        """Count the processor time of the block, which must not suspend, as the validator's."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._ours_s += time.thread_time() - began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in processor time and in wall time."""

    own_s: float
    wall_s: float


class MeteredSpan:
    """The time since its creation, compared with its limits."""

    def __init__(self, meter: Meter, limits: Limits) -> None:
        self._meter = meter
        self._limits = limits
        self._own_s, self._wall_s = meter.own_s(), meter.wall_s()

    @property
    def own_s(self) -> float:
        """The environment's own processor time since its creation."""
        return self._meter.own_s() - self._own_s

    @property
    def wall_s(self) -> float:
        """The wall time since its creation."""
        return self._meter.wall_s() - self._wall_s

    @property
    def cut(self) -> Cut | None:
        """The limit that is exceeded now; None while there is time left."""
        if self.own_s > self._limits.own_s:
            return Cut.OWN
        return Cut.WALL if self.wall_s > self._limits.wall_s else None


_REFERENCE_S = 0.012
"""Seconds to compile argparse on the reference machine: one core of a 2023 AMD EPYC."""
_NUM_TRIES = 3
_MOST = 5.0


def slowness() -> float:
    """Return how many times slower this machine is than the reference machine, from 1 to 5.

    It is measured now, in CPU time. Processes that share a core or its caches do slow it down, but
    waiting for a processor does not count.
    """
    source = inspect.getsource(argparse)
    best_s = min(_compiling_s(source) for _ in range(_NUM_TRIES))
    return min(max(best_s / _REFERENCE_S, 1.0), _MOST)


def _compiling_s(source: str) -> float:
    started_s = time.thread_time()
    compile(source, "argparse.py", "exec")
    return time.thread_time() - started_s


_BEAT_S = 0.01
_NUM_BEATS = 2000
_LOOK_S = 0.005
_LONGEST_LOOK_S = 8 * _LOOK_S
_SLEEPS = ("S", "D")
"""States in which a thread waits for something other than a processor."""


class WaitClock:
    """Reads the kernel's record of how long the calling thread waited; zero if there is none.

    Without that record it samples the thread. macOS has neither, so there a block took all its
    time by itself, also on a busy machine.
    """

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
        elif sys.platform != "darwin":
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
