"""One GPU for a trainer rank and a server, which take turns using its memory.

    sampling -> the server sleeps -> training -> the rank frees its cache -> the server wakes
             -> new weights -> sampling

The rank keeps its weights and its optimizer's state on the GPU all the time, or in CPU memory with
`fsdp_cpu_offload`; `plan.gpus` computes whether both fit. A server that is lost starts again, and
gets its weights, while it is the servers' turn; the trainer's turn waits for that.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from telescope_train.config.schema import TrainConfig


class Sleeps(Protocol):
    """Servers that can free their GPU memory; see `inference.sleep`."""

    async def sleep(self, *, keeps_weights: bool = False) -> None:
        """Free the memory; a server that does not is ended.

        `keeps_weights`: it has its weights again when it wakes, whatever the settings say.
        """
        ...

    async def wake(self) -> None:
        """Allocate the memory again; a server that does not is lost."""
        ...


class FreesMemory(Protocol):
    """Trainer ranks that can free unused GPU memory."""

    async def free_cached_memory(self) -> None:
        """Return GPU memory that holds no tensor."""
        ...


class GpuSharing:
    """Trainer and servers have separate GPUs, so that nobody waits."""

    async def trainer_works(self) -> None:
        """Return when ranks may use the memory of their GPUs."""

    async def servers_work(self) -> None:
        """Return when servers may use the memory of theirs."""

    @asynccontextmanager
    async def servers_turn(self) -> AsyncIterator[None]:
        """Hold the servers' turn during the block, which needs their memory."""
        yield

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        """Hold the trainer's turn during the block; servers have the same weights afterwards."""
        yield


class SharedGpu(GpuSharing):
    """Trainer and servers take turns. Servers are awake at first."""

    def __init__(self, servers: Sleeps, ranks: FreesMemory) -> None:
        self._servers = servers
        self._ranks = ranks
        self._is_servers_turn = True
        self._num_holding = 0
        self._changed = asyncio.Condition()

    async def trainer_works(self) -> None:
        """Put the servers to sleep if they are awake; first waits for blocks in `servers_turn`."""
        await self._give_to_trainer(keeps_weights=False)

    async def _give_to_trainer(self, *, keeps_weights: bool) -> None:
        if not self._is_servers_turn:
            return
        # First of all: nobody else may begin to use their memory.
        self._is_servers_turn = False
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_holding == 0)
        await self._servers.sleep(keeps_weights=keeps_weights)

    async def servers_work(self) -> None:
        """Wake the servers if they sleep; they have no weights until the next update."""
        if self._is_servers_turn:
            return
        await self._ranks.free_cached_memory()
        await self._servers.wake()
        self._is_servers_turn = True
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def servers_turn(self) -> AsyncIterator[None]:
        """Wait for the servers' turn, and hold it during the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_servers_turn)
            self._num_holding += 1
        try:
            yield
        finally:
            self._num_holding -= 1
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        """Put the servers to sleep during the block. It must begin in the servers' turn."""
        assert self._is_servers_turn, "servers that sleep already may have forgotten their weights"
        await self._give_to_trainer(keeps_weights=True)
        yield
        await self.servers_work()


def sleep_level(config: TrainConfig) -> int:
    """Return vLLM's level of sleep for the servers."""
    given = config.inference.colocate_sleep_level
    if given is not None:
        return given
    # With adapters only a part of the weights is sent, so the rest must be kept.
    return 1 if config.trainer.use_lora else 2
