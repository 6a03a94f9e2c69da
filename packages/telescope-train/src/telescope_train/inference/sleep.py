"""Sleeping servers: vLLM frees the memory of its GPU, and allocates it again.

A server may die or hang at any moment, also while it sleeps. A server that does not free its memory
is ended, and started again when the servers may use the GPU (`cluster.colocation`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from telescope_core.base.errors import EndpointError, TelescopeError
from telescope_core.records.servers import ServerState
from telescope_train.cluster.colocation import GpuSharing
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import Loss, Member, Reached, Server, ServerClient
from telescope_train.inference.supervisor import Fleet

SLEEP_PATH = "/sleep"
WAKE_PATH = "/wake_up"


class Ends(Protocol):
    """Can end the process of a server; see `fleet.ServerGroup`."""

    async def end(self, index: int) -> None:
        """Return when nothing is left of server `index`, whether it had died or hung."""
        ...


async def sleep(client: ServerClient, *, level: int) -> None:
    """Return when a server has freed its memory; no request may be running.

    `level`: 1 = weights are kept in CPU memory, 2 = they are discarded, and it must get all of them
    before anything is sampled. One that sleeps already stays as it is.
    """
    await client.control(SLEEP_PATH, query=f"?level={level}&mode=wait", is_repeatable=True)


async def wake(client: ServerClient) -> None:
    """Return when a server has its memory again, whose content is undefined."""
    await client.control(WAKE_PATH, is_repeatable=True)


class SleepingServers:
    """Puts the servers of a pool to sleep and wakes them; those that fail are lost."""

    def __init__(self, pool: ServerPool, processes: Ends, *, level: int) -> None:
        """`level`: as for `sleep`."""
        self._pool = pool
        self._processes = processes
        self._level = level
        self._asleep: list[Member] = []

    async def sleep(self, *, keeps_weights: bool = False) -> None:
        """Return when all memory has been given back. Nothing may be in flight.

        `keeps_weights`: at level 1, whatever the level of these servers is.
        """
        for client in (one.client for one in self._pool.servers if one.takes_requests):
            if client.num_in_flight:
                raise TelescopeError(
                    f"expected no request at {client.base_url} before it sleeps, got "
                    f"{client.num_in_flight} in flight; it would forget what it computed for them"
                )
        self._asleep = []
        level = 1 if keeps_weights else self._level
        await asyncio.gather(
            *(
                self._put_to_sleep(index, server, level)
                for index, server in enumerate(self._pool.servers)
            )
        )

    async def wake(self) -> None:
        """Return when the servers that sleep have their memory again, or are lost."""
        await asyncio.gather(*(self._wake(one) for one in self._asleep if one.is_left))

    async def _put_to_sleep(self, index: int, server: Server, level: int) -> None:
        member = Member(server, server.life)
        if server.takes_weights:
            try:
                await sleep(server.client, level=level)
            except EndpointError as error:
                reason = f"it did not give its memory back: {error}"
                self._pool.lose(server, reason, life=member.life)
        if member.is_left:
            self._asleep.append(member)
        else:
            # One that hangs holds its memory, which the trainer is about to use.
            await self._processes.end(index)

    async def _wake(self, member: Member) -> None:
        server = member.server
        try:
            await wake(server.client)
        except EndpointError as error:
            self._pool.lose(server, f"it did not wake: {error}", life=member.life)


class SharedGpuFleet:
    """A fleet that starts servers only while they may use the memory of their GPU."""

    def __init__(self, fleet: Fleet, gpu_sharing: GpuSharing) -> None:
        self._fleet = fleet
        self._gpu_sharing = gpu_sharing

    async def until_lost(self, index: int, heard_s: Callable[[], float]) -> Loss:
        """Return the reason when a server has died or hangs; see `supervisor.Fleet`."""
        return await self._fleet.until_lost(index, heard_s)

    async def start_again(self, index: int) -> Reached:
        """Start a server when it may; returns its address once it is healthy."""
        async with self._gpu_sharing.server_starts():
            return await self._fleet.start_again(index)


def bring_in_when_awake(
    give: Callable[[Server], Coroutine[Any, Any, None]], gpu_sharing: GpuSharing
) -> Callable[[Server], Coroutine[Any, Any, None]]:
    """Return a function that updates a server by `give` in the servers' turn."""

    async def bring_in(server: Server) -> None:
        async with gpu_sharing.servers_turn():
            await give(server)
        # Not within the turn: where the ranks are ahead, it gets weights after their turn.
        await server.until(ServerState.SERVING, ServerState.LOST)

    return bring_in
