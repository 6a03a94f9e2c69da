"""Ports for the servers that tests start."""

import random
import socket

_CONSECUTIVE = 4
"""A run of several servers takes the ports after its first one as well."""


def free_port() -> int:
    """Return a port on which nothing listens, nor on the three after it.

    It is below those that the system hands out by itself (from 32768 on Linux), so that no
    connection of another test takes it before its server does.
    """
    for _ in range(100):
        first = random.SystemRandom().randrange(20_000, 32_000)
        if all(_is_free(first + index) for index in range(_CONSECUTIVE)):
            return first
    raise AssertionError("no free ports between 20,000 and 32,000")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
