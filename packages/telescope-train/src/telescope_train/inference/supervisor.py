"""Keep the servers of a run alive: a lost one is started again and receives the weights.

A server that is lost again and again, and did nothing in between, is given up, and the run goes on
with the others; one that dies twice of the same error before it samples a token, at once. The run
ends when the last one is given up, with the reason.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from telescope_core.base.errors import ProcessDiedError, TelescopeError
from telescope_core.records.servers import ServerRole, ServerState
from telescope_train.inference.death_cause import is_same_cause
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import Loss, Reached, Server, ServerDiedError

CAUSE_SHOWS_WITHIN_S = 5.0
"""Seconds after the loss of a used server in which its actor may report the cause of death."""
MOST_RESTARTS = 5
"""Restarts in a row of a server that did no work in between.

One that has sampled tokens or gone through an update has done something, and so has one that has
waited for that for `GOOD_LIFE_S`."""
GOOD_LIFE_S = 300.0
"""Seconds after a start that count as work."""
BACKOFF_S = (0.0, 2.0, 5.0, 15.0, 45.0)
"""Seconds before each restart in a row, because the cause of a failed start may pass."""


class Fleet(Protocol):
    """The processes of the servers; see `fleet.ServerGroup`."""

    async def until_lost(self, index: int, heard_s: Callable[[], float]) -> Loss:
        """Return the reason as soon as server `index` has died or hangs.

        `heard_s` says when it last gave a sign of life, on the clock of the event loop.
        """
        ...

    async def start_again(self, index: int) -> Reached:
        """End the rest of server `index`, and start it; returns its address once it is healthy.

        Raises ProcessDiedError if it does not become healthy.
        """
        ...


class Supervisor:
    """Watches every server of a pool and restarts lost ones."""

    def __init__(
        self,
        pool: ServerPool,
        fleet: Fleet,
        bring_in: Callable[[Server], Coroutine[Any, Any, None]],
        *,
        warn: Callable[[str], None] = lambda text: None,
        first: int = 0,
        is_needed: bool = True,
        beside: Sequence[ServerPool] = (),
    ) -> None:
        """`bring_in` returns when a loading server serves, or is lost.

        `warn` tells a person. `first`: number of the pool's first server in the fleet.
        `is_needed`: whether the run ends when no server of the pool is left, nor one of those
        `beside`, which do the same work.
        """
        self._first = first
        self._is_needed = is_needed
        self._pools = (pool, *beside)
        self._pool = pool
        self._fleet = fleet
        self._bring_in = bring_in
        self._warn = warn

    async def run(self) -> None:
        """Never return; raises ProcessDiedError when no server is left."""
        watching = [
            asyncio.create_task(self._keep(index, server))
            for index, server in enumerate(self._pool.servers)
        ]
        try:
            await asyncio.gather(*watching)
            # A watch that ends would end the watches over all other processes of the run as well.
            await asyncio.Event().wait()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)

    async def _keep(self, index: int, server: Server) -> None:
        num_restarts = 0
        began_s = asyncio.get_running_loop().time()
        last_cause = ""
        while True:
            cause = await self._until_lost(index, server)
            while server.state is ServerState.LOST:
                if server.has_served or asyncio.get_running_loop().time() - began_s > GOOD_LIFE_S:
                    num_restarts = 0
                if not server.has_sampled and is_same_cause(cause, last_cause):
                    self._give_up(
                        server, "twice in a row, before it had sampled a token, of one cause"
                    )
                    return
                if num_restarts == MOST_RESTARTS:
                    times = f"{MOST_RESTARTS + 1} times in a row without having done anything"
                    self._give_up(server, f"{times}, the last time because")
                    return
                await asyncio.sleep(BACKOFF_S[num_restarts])
                num_restarts += 1
                last_cause = "" if server.has_sampled else cause
                began_s, cause = await self._restart(index, server, num_restarts)

    async def _until_lost(self, index: int, server: Server) -> str:
        """Return when the server is lost: its process has died, or a request to it failed.

        Returns the first error that it printed, if it has died of one.
        """
        number = self._first + index
        watch = asyncio.create_task(self._fleet.until_lost(number, lambda: server.client.heard_s))
        in_use = asyncio.create_task(server.until(ServerState.LOST))
        try:
            await asyncio.wait([watch, in_use], return_when=asyncio.FIRST_COMPLETED)
            # A request hears first that the engine or the connection is gone, and not why.
            await asyncio.wait([watch], timeout=CAUSE_SHOWS_WITHIN_S)
            if not watch.done():
                return ""
            loss = watch.result()
            self._pool.lose(server, loss.reason)
            server.reason = loss.reason
            return loss.cause
        finally:
            for task in (watch, in_use):
                task.cancel()
            await asyncio.wait([watch, in_use])

    async def _restart(self, index: int, server: Server, number: int) -> tuple[float, str]:
        """Restart a server, or lose it again; returns when it was healthy, and why it died."""
        clock = asyncio.get_running_loop()
        healthy_s, cause = math.inf, ""
        address = server.client.base_url
        self._warn(
            f"inference server {address} is lost and started again ({number} of {MOST_RESTARTS}): "
            f"{server.reason}"
        )
        server.become(ServerState.STARTING, reason=server.reason)
        try:
            # It is elsewhere if its node was lost, or its port was taken meanwhile.
            address, identity = await self._fleet.start_again(self._first + index)
            server.client.base_url, server.client.identity = address, identity
            healthy_s = clock.time()
            server.become(ServerState.LOADING)
            cause = await self._until_brought_in(index, server)
        except TelescopeError as error:
            cause = error.cause if isinstance(error, ServerDiedError) else ""
            # After any error, such as a port that is taken, the other servers go on.
            self._pool.lose(server, str(error))
        if server.takes_requests:
            self._warn(f"inference server {address} is back, with weights {server.version}")
        return healthy_s, cause

    async def _until_brought_in(self, index: int, server: Server) -> str:
        """Return when a loading server serves, or is lost; then with the cause of its death.

        It may wait for the next weights for long, so its process is watched meanwhile.
        """
        number = self._first + index
        bringing = asyncio.create_task(self._bring_in(server))
        watch = asyncio.create_task(self._fleet.until_lost(number, lambda: server.client.heard_s))
        try:
            await asyncio.wait([bringing, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                self._pool.lose(server, watch.result().reason)
            await bringing
            return watch.result().cause if watch.done() else ""
        finally:
            for task in (bringing, watch):
                task.cancel()
            await asyncio.wait([bringing, watch])

    def _give_up(self, server: Server, how: str) -> None:
        """Continue without a server; raises ProcessDiedError if it was the last one."""
        reason = server.reason
        self._pool.give_up(server)
        address = server.client.base_url
        if self._is_needed and all(one.is_given_up for one in self._pools):
            what = "" if server.role is ServerRole.ROLLOUT else f" with the role {server.role}"
            raise ProcessDiedError(
                f"no inference server{what} is left: {address} was lost {how}: {reason}"
            )
        self._warn(
            f"inference server {address} is given up, and the run goes on without it. It was lost "
            f"{how}: {reason}"
        )
