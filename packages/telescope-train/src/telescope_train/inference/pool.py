"""Several inference servers as one: a group stays on one server, new groups go to the least busy.

A group's rollouts share their prompt, so one server computes it once (prefix caching).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from telescope_core.types import Sampling, WeightVersion
from telescope_train.inference.client import Generation
from telescope_train.inference.load import ServerLoad

MAX_ROUTES = 10_000
"""Groups whose server is remembered. A group that is forgotten loses only its cached prefix."""


class ServerClient(Protocol):
    """The way to one server; see `client.TokenClient`."""

    base_url: str
    num_in_flight: int
    """Requests that it has not answered yet."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        cache_salt: str,
        priority: int = 0,
    ) -> Generation:
        """Sample one continuation of `prompt_ids`."""
        ...

    async def control(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
    ) -> None:
        """Call an administrative route."""
        ...

    async def load(self) -> ServerLoad | None:
        """Return how busy the server is; None if it does not say."""
        ...

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        ...


class RolloutServers(Protocol):
    """What the policy of one rollout asks: the pool, or what stands in front of it."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        group_id: str,
        priority: int = 0,
    ) -> Generation:
        """Sample one continuation; a lower `priority` goes first."""
        ...


class ServerPool:
    """Routes requests. `version` is the newest weight version that all servers have."""

    def __init__(self, clients: Sequence[ServerClient]) -> None:
        self.clients = list(clients)
        self.version: WeightVersion = 0
        self._routes: OrderedDict[str, ServerClient] = OrderedDict()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        group_id: str,
        priority: int = 0,
        on_sent: Callable[[str, WeightVersion], None] | None = None,
    ) -> Generation:
        """Sample one continuation on the group's server; a lower `priority` goes first.

        `on_sent` gets the address of the server that the request goes to, and the live weights.
        """
        # Nothing is awaited from here until the request is counted in `num_in_flight`. The other
        # rollouts of the group, which ask at the same moment, therefore find its route, and the
        # next group sees how busy this server has become.
        client = self._routes.get(group_id)
        if client is None:
            client = min(self.clients, key=lambda candidate: candidate.num_in_flight)
            self._routes[group_id] = client
            if len(self._routes) > MAX_ROUTES:
                self._routes.popitem(last=False)
        if on_sent is not None:
            on_sent(client.base_url, self.version)
        # vLLM shares cached prefixes only between requests with the same salt, so that a prefix
        # computed under older weights is never reused.
        return await client.generate(
            prompt_ids,
            sampling,
            stop_token_ids=stop_token_ids,
            cache_salt=f"v{self.version}",
            priority=priority,
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        for client in self.clients:
            await client.close()
