"""One GPU for a trainer rank and a server, which take turns using its memory, or both keep theirs.

    sampling -> the server sleeps -> training -> the rank frees its cache -> the server wakes
             -> new weights -> sampling

With turns, a rank keeps what `plan.gpus` computes, and a lost server starts and gets weights in the
servers' turn, for which the trainer's waits. Without, ranks rest only while a server starts.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from telescope_core.base.errors import ProcessDiedError
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
    async def server_starts(self) -> AsyncIterator[None]:
        """Hold the memory for a server that starts during the block."""
        async with self.servers_turn():
            yield

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        """Hold the trainer's turn during the block; servers have the same weights afterwards."""
        yield


class _Turns:
    """Whose turn it is: the servers', which can be held, or the trainer's. The servers begin."""

    def __init__(self) -> None:
        self.is_servers = True
        self._num_holding = 0
        self._changed = asyncio.Condition()

    async def give_to_trainer(self) -> None:
        """Return when nobody holds the servers' turn."""
        # First of all: nobody else may begin to use their memory.
        self.is_servers = False
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_holding == 0)

    async def give_to_servers(self) -> None:
        self.is_servers = True
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def servers(self) -> AsyncIterator[None]:
        """Wait for the servers' turn, and hold it during the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_servers)
            self._num_holding += 1
        try:
            yield
        finally:
            self._num_holding -= 1
            async with self._changed:
                self._changed.notify_all()


class SharedGpu(GpuSharing):
    """Trainer and servers take turns. Servers are awake at first."""

    def __init__(self, servers: Sleeps, ranks: FreesMemory) -> None:
        self._servers = servers
        self._ranks = ranks
        self._turns = _Turns()
        self._are_asleep = False

    async def trainer_works(self) -> None:
        """Put the servers to sleep if they are awake; first waits for blocks in `servers_turn`."""
        # Whose turn it is does not tell it: a call that was canceled may have got only so far.
        if not self._are_asleep:
            await self._turns.give_to_trainer()
            await self._servers.sleep()
            self._are_asleep = True

    async def servers_work(self) -> None:
        """Wake the servers if they sleep; they have no weights until the next update."""
        if not self._turns.is_servers:
            await self._ranks.free_cached_memory()
            self._are_asleep = False
            await self._servers.wake()
            await self._turns.give_to_servers()

    @asynccontextmanager
    async def servers_turn(self) -> AsyncIterator[None]:
        """Wait for the servers' turn, and hold it during the block."""
        async with self._turns.servers():
            yield

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        """Put the servers to sleep during the block. It must begin in the servers' turn."""
        assert self._turns.is_servers, "servers that sleep may have forgotten their weights"
        await self._turns.give_to_trainer()
        await self._servers.sleep(keeps_weights=True)
        yield
        await self.servers_work()


class ResidentGpu(GpuSharing):
    """Trainer and servers keep their memory, and work at the same time.

    A server measures what is free as it starts, and ends if that grows meanwhile. So ranks rest
    then, without what they have in torch's cache. With streamed gradients they are not told to, but
    they get nothing to train on while the server is gone.
    """

    def __init__(self, ranks: FreesMemory) -> None:
        self._ranks = ranks
        self._turns = _Turns()

    async def trainer_works(self) -> None:
        """Wait for a server that starts, and make others wait."""
        await self._turns.give_to_trainer()

    async def servers_work(self) -> None:
        """Let servers start."""
        await self._turns.give_to_servers()

    @asynccontextmanager
    async def server_starts(self) -> AsyncIterator[None]:
        """Wait until the ranks rest, free what they hold in vain, and hold them."""
        async with self._turns.servers():
            with suppress(ProcessDiedError):  # a dead rank has no memory
                await self._ranks.free_cached_memory()
            yield


def sleep_level(config: TrainConfig) -> int:
    """Return vLLM's level of sleep for the servers."""
    given = config.inference.colocate_sleep_level
    if given is not None:
        return given
    # With adapters only a part of the weights is sent, so the rest must be kept.
    return 1 if config.trainer.use_lora else 2
