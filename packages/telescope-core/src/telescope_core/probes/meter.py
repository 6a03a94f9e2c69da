"""Measure the cost of an environment: its processor time, without the validator's own.

A busy machine makes everything take longer, but it costs no more processor time. So limits that
judge an environment are in processor time; wall time only ends activities that wait forever. A slow
machine gets more of it: `slowness` says how much.
"""

import argparse
import inspect
import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum


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
