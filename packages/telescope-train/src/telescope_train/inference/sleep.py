"""Servers that sleep: vLLM gives the memory of its GPU back, and takes it again."""

import asyncio
from collections.abc import Sequence

from telescope_core.errors import TelescopeError
from telescope_train.inference.leases import ServerClient

SLEEP_PATH = "/sleep"
WAKE_PATH = "/wake_up"
IS_SLEEPING_PATH = "/is_sleeping"


class Sleeping:
    """Puts servers to sleep and wakes them, all together."""

    def __init__(self, clients: Sequence[ServerClient], *, level: int) -> None:
        """`level`: 1 = weights wait in CPU memory, 2 = they are forgotten.

        After level 2 a server must get all weights before anything is sampled.
        """
        self._clients = clients
        self._level = level

    async def sleep(self) -> None:
        """Return when all memory has been given back. Nothing may be in flight."""
        for client in self._clients:
            if client.num_in_flight:
                raise TelescopeError(
                    f"expected no request at {client.base_url} before it sleeps, got "
                    f"{client.num_in_flight} in flight; it would forget what it computed for them"
                )
        query = f"?level={self._level}&mode=wait"
        await self._all(SLEEP_PATH, query)

    async def wake(self) -> None:
        """Return when servers have their memory again; what is in it is not said."""
        await self._all(WAKE_PATH, "")

    async def _all(self, path: str, query: str) -> None:
        # Both are repeatable: a server that sleeps already, or is awake, stays as it is.
        await asyncio.gather(
            *(client.control(path, query=query, is_repeatable=True) for client in self._clients)
        )
