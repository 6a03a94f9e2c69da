"""How slow this machine is: limits in seconds should mean the same work everywhere."""

import argparse
import inspect
import time

_REFERENCE_S = 0.012
"""What compiling argparse takes on one core of an AMD EPYC of 2023, the machine of the limits."""
_NUM_TRIES = 3
_MOST = 5.0


def slowness() -> float:
    """Return how many times as long as on the reference machine this one takes, from 1 to 5.

    Measured now, by CPU time: neighbours that share a core or its caches count, waiting does not.
    """
    source = inspect.getsource(argparse)
    best_s = min(_compiling_s(source) for _ in range(_NUM_TRIES))
    return min(max(best_s / _REFERENCE_S, 1.0), _MOST)


def _compiling_s(source: str) -> float:
    started_s = time.thread_time()
    compile(source, "argparse.py", "exec")
    return time.thread_time() - started_s
