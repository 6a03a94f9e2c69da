"""`ByLoad`: which server of a pool has the most room, without looking at all of them.

A heap holds an entry for every load that a server had. One that is not true any more
is dropped when it comes up, and all are made anew before they outnumber the servers by far.
"""

import heapq
from collections.abc import Sequence

from telescope_train.inference.servers import Server

_MOST_PER_SERVER = 4
_FEW = 64
"""Entries that are never too many."""
Load = tuple[float, int]
"""The lowest one has the most room: the share of its slots that is held, and its requests."""


def load_of(server: Server) -> Load:
    """Return how busy a server is."""
    return server.num_in_slots / server.most_in_slots, server.num_requests


class ByLoad:
    """The servers of a pool, ordered by their room; among equals, in the order of the pool."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._numbers = {id(server): number for number, server in enumerate(servers)}
        self._entries: list[tuple[Load, int]] = []
        self._make_anew()

    def least(self) -> Server | None:
        """Return the server with the most room of those that take requests; None if none does."""
        while self._entries:
            load, number = self._entries[0]
            server = self._servers[number]
            if load == load_of(server) and server.takes_requests:
                return server
            heapq.heappop(self._entries)
        return None

    def add(self, server: Server, num_requests: int = 0, *, in_slots: bool = False) -> None:
        """Note that a server has that many requests more, or that its room has changed."""
        server.num_requests += num_requests
        server.num_in_slots += num_requests if in_slots else 0
        if len(self._entries) >= _FEW + _MOST_PER_SERVER * len(self._servers):
            self._make_anew()
        heapq.heappush(self._entries, (load_of(server), self._numbers[id(server)]))

    def _make_anew(self) -> None:
        self._entries = [
            (load_of(server), number)
            for number, server in enumerate(self._servers)
            if server.takes_requests
        ]
        heapq.heapify(self._entries)
