"""Measure how slow this machine is, so that limits in seconds allow the same work everywhere."""

import argparse
import inspect
import time

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
