"""One GPU for a trainer rank and a server: who of them has its memory.

    sampling -> the server sleeps -> training -> the rank frees its cache -> the server wakes
             -> new weights -> sampling

The rank keeps its weights and its optimizer's state on the GPU all the time, or in CPU memory with
`fsdp_cpu_offload`; `plan.gpus` computes whether both fit.
"""

from typing import Protocol

from telescope_train.config.schema import TrainConfig


class Sleeps(Protocol):
    """Servers that can give their memory back; see `inference.sleep`."""

    async def sleep(self) -> None:
        """Give the memory back."""
        ...

    async def wake(self) -> None:
        """Take it again."""
        ...


class FreesMemory(Protocol):
    """Trainer ranks that can give back what they do not use."""

    async def free_cached_memory(self) -> None:
        """Give memory that no tensor is in back to the GPU."""
        ...


class Turns:
    """Everybody has a GPU of their own: nobody waits for a turn."""

    async def trainer_works(self) -> None:
        """Return when ranks may use the memory of their GPU."""

    async def servers_work(self) -> None:
        """Return when servers may use the memory of theirs."""


class SharedGpu(Turns):
    """Trainer and servers take turns. Servers are awake at first."""

    def __init__(self, servers: Sleeps, ranks: FreesMemory) -> None:
        self._servers = servers
        self._ranks = ranks
        self._are_awake = True

    async def trainer_works(self) -> None:
        """Put the servers to sleep, if they are awake."""
        if self._are_awake:
            await self._servers.sleep()
            self._are_awake = False

    async def servers_work(self) -> None:
        """Wake the servers, if they sleep; they hold no weights before the next update."""
        if not self._are_awake:
            await self._ranks.free_cached_memory()
            await self._servers.wake()
            self._are_awake = True


def sleep_level(config: TrainConfig) -> int:
    """Return how deep servers sleep."""
    given = config.inference.colocate_sleep_level
    if given is not None:
        return given
    # With adapters only a part of the weights is sent, so the rest must be kept.
    return 1 if config.trainer.use_lora else 2
