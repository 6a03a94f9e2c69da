"""One versioned weight update of all servers: pause, send, name the version, resume.

A server resumes only after it has everything and knows its version; when a transfer fails, the
servers stay paused and the run ends, so a half-received version is never served.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Literal

from telescope_core.types import WeightVersion
from telescope_train.backends.protocol import Ranks, TensorHeader
from telescope_train.inference.client import TokenClient
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.wire import PAUSE_PATH

InFlight = Literal["continue", "pause"]
_PAUSE_MODES = {"continue": "keep", "pause": "wait"}


class WeightPublisher:
    """Publishes the trainer's weights to every server of the pool."""

    def __init__(self, pool: ServerPool, ranks: Ranks, *, in_flight: InFlight) -> None:
        self._pool = pool
        self._ranks = ranks
        self._pause_query = f"?mode={_PAUSE_MODES[in_flight]}"
        self._headers: list[TensorHeader] = []

    async def connect(self) -> None:
        """Make the transfer group of trainer rank 0 and all servers."""
        self._headers = await self._ranks.weight_headers()
        host, port = await self._ranks.meeting_point()
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
        await _together(self._ranks.connect(host, port, world_size), *joining)

    async def publish(self, version: WeightVersion) -> None:
        """Make `version` live everywhere; returns when every server samples from it."""
        await self._everywhere(PAUSE_PATH, query=self._pause_query, is_repeatable=True)
        await self._everywhere("/start_weight_update")
        header_rows = [asdict(header) for header in self._headers]
        update = {
            "names": [row["name"] for row in header_rows],
            "dtypes": [row["dtype"] for row in header_rows],
            "shapes": [row["shape"] for row in header_rows],
        }
        receiving = [
            client.control("/update_weights", {"update_info": update})
            for client in self._pool.clients
        ]
        await _together(self._ranks.send_weights(), *receiving)
        await self._everywhere("/finish_weight_update", {"weight_version": str(version)})
        self._pool.version = version
        await self._everywhere("/resume", is_repeatable=True)

    async def _everywhere(
        self,
        path: str,
        body: dict[str, object] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
    ) -> None:
        def call(client: TokenClient) -> Awaitable[None]:
            return client.control(path, body, query=query, is_repeatable=is_repeatable)

        await _together(*(call(client) for client in self._pool.clients))


async def _together(*calls: Awaitable[None]) -> None:
    """Await all; the first failure is raised at once."""
    await asyncio.gather(*calls)
