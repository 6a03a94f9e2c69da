"""Ports for the servers that tests start."""

import os
import random
import socket
from collections.abc import Iterator
from itertools import cycle

_FIRST, _LAST = 20_000, 32_000
"""Below the ports that Linux hands out by itself (from 32,768), so that no connection of another
test takes a port before the server that it was chosen for listens on it."""

_CONSECUTIVE = 4
"""A run of several servers takes the ports after its first one as well."""

_MOST_LANES = 8
"""Processes of pytest side by side have shares of the ports, so that two never choose the same one.
`scripts/run_tests.py` gives each of them the number of its lane."""


def _of_this_lane() -> Iterator[int]:
    """Return the first ports of all blocks of this lane, again and again, from a random one."""
    lane = int(os.environ.get("TELESCOPE_TEST_LANE", "0")) % _MOST_LANES
    share = (_LAST - _FIRST) // _MOST_LANES
    start = _FIRST + lane * share
    blocks = list(range(start, start + share - _CONSECUTIVE + 1, _CONSECUTIVE))
    first = random.SystemRandom().randrange(len(blocks))
    return cycle([*blocks[first:], *blocks[:first]])


_blocks = _of_this_lane()


def free_port() -> int:
    """Return a port on which nothing listens, nor on the three after it.

    No other test of this session is told one of these ports while nothing listens there yet.
    """
    for _ in range(100):
        first = next(_blocks)
        if all(_is_free(first + index) for index in range(_CONSECUTIVE)):
            return first
    raise AssertionError(f"no four free ports in a row between {_FIRST:,} and {_LAST:,}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
