"""The trainer ranks of a run: one Ray actor each, called together and awaited together."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from telescope_train.backends.protocol import BackendSettings
from telescope_train.batch import PackedBatch
from telescope_train.inference.server import free_port
from telescope_train.runtime.cluster import answer
from telescope_train.weights.gloo import GlooPublisher, TensorHeader, headers
from telescope_train.worker import TrainerWorker


class RankActor:
    """One trainer rank in a process of its own, with rank 0's side of the weight transfer."""

    def __init__(self) -> None:
        self._worker: TrainerWorker | None = None
        self._publisher: GlooPublisher | None = None

    def address(self) -> tuple[str, int]:
        """Return (host, free port) of this node, for others to meet at."""
        return ray.util.get_node_ip_address(), free_port()

    def open(self, settings: BackendSettings, **placement: Any) -> float:
        """Load the model; returns the packing self-check's largest difference, nats."""
        self._worker = TrainerWorker(settings, **placement)
        return self._worker.packing_difference

    def train_step(self, batches: Sequence[PackedBatch], version: int) -> dict[str, float]:
        """Take one optimiser step."""
        return self._trainer.train_step(batches, version=version)

    def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors that `send_weights` sends."""
        return headers(self._trainer.transfer_weights())

    def connect(self, host: str, port: int, world_size: int) -> None:
        """Open rank 0's end of the transfer group; returns when all servers have joined."""
        self._publisher = GlooPublisher(host=host, port=port, world_size=world_size)

    def send_weights(self) -> None:
        """Gather every tensor; rank 0 sends it to the servers."""
        if self._publisher is not None:
            self._publisher.send(self._trainer.transfer_weights())
        else:
            for _ in self._trainer.transfer_weights():
                pass  # the other ranks only take part in the gathering

    def close(self) -> None:
        """Leave the process group."""
        self._trainer.close()

    def start_checkpoint(self, folder: str, with_training_state: bool) -> None:
        """Begin to write the state in the background."""
        self._trainer.start_checkpoint(folder, with_training_state=with_training_state)

    def checkpoint_is_written(self) -> bool:
        """Return whether it is written."""
        return self._trainer.checkpoint_is_written()

    def finish_checkpoint(self) -> None:
        """Wait for it."""
        self._trainer.finish_checkpoint()

    def load_checkpoint(self, folder: str) -> None:
        """Continue from a checkpoint."""
        self._trainer.load_checkpoint(folder)

    def save_pretrained(self, folder: str) -> None:
        """Write the model in Hugging Face format."""
        self._trainer.save_pretrained(folder)

    @property
    def _trainer(self) -> TrainerWorker:
        assert self._worker is not None, "open comes first"
        return self._worker


class RankGroup:
    """All trainer ranks. Each method is one collective call."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    @classmethod
    def start(cls, places: Sequence[dict[str, Any]]) -> "RankGroup":
        """Start one process per place; `open` loads the model."""
        actor_class = ray.remote(RankActor)
        return cls([actor_class.options(**place).remote() for place in places])

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self._actors)

    async def open(self, settings: BackendSettings, *, num_threads: int) -> float:
        """Load the model on every rank; returns the packing self-check's largest difference."""
        host, port = await self._rank(0, "address")
        differences = await asyncio.gather(
            *(
                answer(
                    actor.open.remote(
                        settings,
                        rank=rank,
                        world_size=self.num_ranks,
                        master_address=host,
                        master_port=port,
                        num_threads=num_threads,
                    ),
                    process=_label(rank),
                )
                for rank, actor in enumerate(self._actors)
            )
        )
        return max(differences)

    async def train_step(
        self, shards: Sequence[Sequence[PackedBatch]], version: int
    ) -> dict[str, float]:
        """Take one optimiser step, one shard per rank; returns metrics over all of them."""
        rows = await asyncio.gather(
            *(
                answer(actor.train_step.remote(shard, version), process=_label(rank))
                for rank, (actor, shard) in enumerate(zip(self._actors, shards, strict=True))
            )
        )
        return rows[0]

    async def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors that `send_weights` sends."""
        return (await self._all("weight_headers"))[0]

    async def meeting_point(self) -> tuple[str, int]:
        """Return (host, port) where servers can meet rank 0."""
        return await self._rank(0, "address")

    async def connect(self, host: str, port: int, world_size: int) -> None:
        """Open rank 0's end of the weight transfer."""
        await self._rank(0, "connect", host, port, world_size)

    async def send_weights(self) -> None:
        """Send all weights to all servers."""
        await self._all("send_weights")

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Copy the state on every rank and begin to write it; training may go on."""
        await self._all("start_checkpoint", str(folder), with_training_state)

    async def checkpoint_is_written(self) -> bool:
        """Return whether every rank is done with its part."""
        return all(await self._all("checkpoint_is_written"))

    async def finish_checkpoint(self) -> None:
        """Wait for all parts; raises when one could not be written."""
        await self._all("finish_checkpoint")

    async def load_checkpoint(self, folder: Path) -> None:
        """Continue from the state in `folder`, whatever number of ranks wrote it."""
        await self._all("load_checkpoint", str(folder))

    async def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""
        await self._all("save_pretrained", str(folder))

    async def _rank(self, rank: int, method: str, *arguments: Any) -> Any:
        reference = getattr(self._actors[rank], method).remote(*arguments)
        return await answer(reference, process=_label(rank))

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(
            *(self._rank(rank, method, *arguments) for rank in range(self.num_ranks))
        )


def _label(rank: int) -> str:
    return f"trainer rank {rank}"
