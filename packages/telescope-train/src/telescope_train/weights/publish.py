"""A versioned update of all servers, of weights or of an adapter: pause, send, version, resume.

A server resumes only after it has received everything and knows its version. If a transfer fails,
the servers stay paused and the run ends, so partly received weights are never sampled from.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Literal

from telescope_core.types import WeightVersion
from telescope_train.backends.protocol import Ranks, TensorHeader
from telescope_train.inference.pool import ServerClient, ServerPool
from telescope_train.inference.wire import PAUSE_AND_CLEAR, PAUSE_AND_KEEP, PAUSE_PATH

InFlight = Literal["continue", "pause"]
"""Whether requests in flight keep what the old weights computed of their prefix (`continue`), or
compute it again under the new ones (`pause`)."""
_PAUSE_QUERIES = {"continue": PAUSE_AND_KEEP, "pause": PAUSE_AND_CLEAR}


class WeightPublisher:
    """Publishes the trainer's weights to every server of the pool."""

    def __init__(
        self, pool: ServerPool, ranks: Ranks, *, in_flight: InFlight, sends_adapter: bool = False
    ) -> None:
        """`sends_adapter`: what the ranks send is a LoRA adapter, not weights."""
        self._pool = pool
        self._ranks = ranks
        self._sends_adapter = sends_adapter
        self._pause_query = f"?{_PAUSE_QUERIES[in_flight]}"
        self._headers: list[TensorHeader] = []

    async def connect(self) -> None:
        """Create the transfer group of trainer rank 0 and all servers.

        Servers that compute an adapter get the first one here, because requests name it from the
        start: one that was added later would not be computed for those that are running then.
        """
        # Names, dtypes and shapes stay the same for the whole run, so they are asked for once.
        self._headers = await self._ranks.weight_headers()
        host, port = await self._ranks.meeting_point()
        # Rank 0 is the trainer, and each server is one worker with one rank.
        world_size = 1 + len(self._pool.clients)
        joining = [
            client.control(
                "/init_weight_transfer_engine",
                {
                    "init_info": {
                        "host": host,
                        "port": port,
                        "world_size": world_size,
                        "rank_offset": 1 + index,
                    }
                },
            )
            for index, client in enumerate(self._pool.clients)
        ]
        # At the same time: no member's call returns before all others have joined.
        await _together(self._ranks.connect(host, port, world_size), *joining)
        if self._sends_adapter:
            await self.publish(self._pool.version)

    async def publish(self, version: WeightVersion) -> None:
        """Make `version` live on all servers; returns when every server samples from it."""
        # First of all, because the next call takes the weights out of the layers: a forward pass
        # after it would fail or mix two versions.
        await self._everywhere(PAUSE_PATH, query=self._pause_query, is_repeatable=True)
        if self._sends_adapter:
            await self._send_adapter(version)
        else:
            await self._send_weights(version)
        # While the servers are paused: from now on requests carry the new version in their cache
        # salt, so none is answered from keys and values that old weights computed.
        self._pool.version = version
        await self._everywhere("/resume", is_repeatable=True)

    async def _send_weights(self, version: WeightVersion) -> None:
        await self._everywhere("/start_weight_update")
        # None of these calls is repeatable: vLLM refuses to start or finish an update twice.
        await self._send("/update_weights", {"update_info": self._update_info()})
        await self._everywhere("/finish_weight_update", {"weight_version": str(version)})

    async def _send_adapter(self, version: WeightVersion) -> None:
        arguments = {"update_info": self._update_info()}
        await self._send("/collective_rpc", {"method": "receive_adapter", "kwargs": arguments})
        await self._everywhere("/update_weight_version", {"new_version": str(version)})

    async def _send(self, path: str, body: dict[str, object]) -> None:
        receiving = [client.control(path, body) for client in self._pool.clients]
        # At the same time: a broadcast ends only when every receiver takes part.
        await _together(self._ranks.send_weights(), *receiving)

    def _update_info(self) -> dict[str, object]:
        header_rows = [asdict(header) for header in self._headers]
        return {
            "names": [row["name"] for row in header_rows],
            "dtypes": [row["dtype"] for row in header_rows],
            "shapes": [row["shape"] for row in header_rows],
        }

    async def _everywhere(
        self,
        path: str,
        body: dict[str, object] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
    ) -> None:
        def call(client: ServerClient) -> Awaitable[None]:
            return client.control(path, body, query=query, is_repeatable=is_repeatable)

        await _together(*(call(client) for client in self._pool.clients))


async def _together(*calls: Awaitable[None]) -> None:
    """Await all calls; the first failure is raised at once."""
    # The others are not cancelled: a broadcast cannot be interrupted and has a deadline of its own.
    await asyncio.gather(*calls)
