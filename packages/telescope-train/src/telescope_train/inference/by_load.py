"""`ByLoad`: which server of a pool has the fewest requests, without looking at all of them.

A heap holds an entry for every number of requests that a server had. One that is not true any more
is dropped when it comes up, and all are made anew before they outnumber the servers by far.
"""

import heapq
from collections.abc import Sequence

from telescope_train.inference.leases import Lease

_MOST_PER_SERVER = 4
_FEW = 64
"""Entries that are never too many."""


class ByLoad:
    """The servers of a pool, ordered by their requests; among equals, in the order of the pool."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._leases = leases
        self._numbers = {id(lease): number for number, lease in enumerate(leases)}
        self._entries: list[tuple[int, int]] = []
        self._make_anew()

    def least(self) -> Lease | None:
        """Return the server with the fewest requests of those that take some; None if none does."""
        while self._entries:
            num_requests, number = self._entries[0]
            lease = self._leases[number]
            if lease.num_requests == num_requests and lease.takes_requests:
                return lease
            heapq.heappop(self._entries)
        return None

    def add(self, lease: Lease, num_requests: int = 0) -> None:
        """Note that a server has that many requests more, and may take further ones."""
        lease.num_requests += num_requests
        if len(self._entries) >= _FEW + _MOST_PER_SERVER * len(self._leases):
            self._make_anew()
        heapq.heappush(self._entries, (lease.num_requests, self._numbers[id(lease)]))

    def _make_anew(self) -> None:
        self._entries = [
            (lease.num_requests, number)
            for number, lease in enumerate(self._leases)
            if lease.takes_requests
        ]
        heapq.heapify(self._entries)
