"""The trainer ranks of a run: one Ray actor each, called together and awaited together."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from numpy.typing import NDArray

from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import PackedBatch, Shards, StepPlan
from telescope_train.cluster.ports import free_port
from telescope_train.cluster.ray_cluster import answer
from telescope_train.diagnostics.rank_checks import SelfTest
from telescope_train.trainer.worker import TrainerWorker
from telescope_train.weights.gloo import GlooPublisher
from telescope_train.weights.transport import TensorHeader, headers

WATCH_EVERY_S = 1.0


class RankFacts(NamedTuple):
    """What a rank says of itself once its model is loaded."""

    self_tests: list[SelfTest]
    """All of them passed."""
    gpu_name: str | None
    """None on CPU."""


class RankActor:
    """One trainer rank in a process of its own, with rank 0's side of the weight transfer."""

    def __init__(self) -> None:
        self._worker: TrainerWorker | None = None
        self._publisher: GlooPublisher | None = None

    def ping(self) -> None:
        """Return once the rank is free to answer."""

    def address(self) -> tuple[str, int]:
        """Return (host, free port) of this node, for others to meet at."""
        return ray.util.get_node_ip_address(), free_port()

    def open(self, settings: BackendSettings, **placement: Any) -> RankFacts:
        """Load the model."""
        self._worker = TrainerWorker(settings, **placement)
        return RankFacts(self._worker.self_tests, self._worker.gpu_name)

    def train_step(
        self, minibatches: Sequence[Sequence[PackedBatch]], order: Sequence[int], version: int
    ) -> dict[str, float]:
        """Take the optimizer steps of one batch of rollouts."""
        return self._trainer.train_minibatches(minibatches, order, version=version)

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T of each batch under the present weights."""
        return self._trainer.logprobs(batches)

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[NDArray[np.float32]]:
        """Return logprobs_T of each batch under the reference model."""
        return self._trainer.reference_logprobs(batches)

    def update_reference(self) -> None:
        """Make the present weights the reference model."""
        self._trainer.update_reference()

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

    def __init__(self, actors: Sequence[Any], *, sharing: int = 1) -> None:
        self._actors = list(actors)
        self._sharing = sharing
        self.facts: list[RankFacts] = []
        """Of each rank, after `open`."""

    @classmethod
    def start(cls, places: Sequence[dict[str, Any]], *, sharing: int = 1) -> "RankGroup":
        """Start one process per place; `open` loads the model.

        `sharing`: neighbouring ranks that are given the same batches (context parallelism).
        """
        actor_class = ray.remote(RankActor)
        actors = [actor_class.options(**place).remote() for place in places]
        return cls(actors, sharing=sharing)

    @property
    def num_ranks(self) -> int:
        """How many shards a step has: ranks that share rows count once."""
        return len(self._actors) // self._sharing

    @property
    def gpu_name(self) -> str | None:
        """The GPU of each rank; None on CPU."""
        return self.facts[0].gpu_name

    @property
    def self_tests(self) -> list[SelfTest]:
        """The worst of all ranks in each test."""
        by_test = zip(*(facts.self_tests for facts in self.facts), strict=True)
        return [max(ranks, key=lambda test: test.value) for ranks in by_test]

    async def open(self, settings: BackendSettings, *, num_threads: int) -> None:
        """Load the model on every rank."""
        host, port = await self._rank(0, "address")
        self.facts = await asyncio.gather(
            *(
                answer(
                    actor.open.remote(
                        settings,
                        rank=rank,
                        world_size=len(self._actors),
                        master_address=host,
                        master_port=port,
                        num_threads=num_threads,
                    ),
                    process=_label(rank),
                )
                for rank, actor in enumerate(self._actors)
            )
        )

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        """Take the optimizer steps of `plan`; returns metrics over all of them and all ranks."""
        rows = await asyncio.gather(
            *(
                self._rank(rank, "train_step", plan.of_rank(shard), list(plan.order), version)
                for rank, shard in enumerate(self._shard_of_rank)
            )
        )
        return rows[0]

    async def logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return logprobs_T of [rank][batch] under the present weights; 0 where not trained."""
        return await self._each("logprobs", shards)

    async def reference_logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return logprobs_T of [rank][batch] under the reference model; 0 where not trained."""
        return await self._each("reference_logprobs", shards)

    async def update_reference(self) -> None:
        """Make the present weights the reference model."""
        await self._all("update_reference")

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

    async def watch(self) -> None:
        """Never return; raises ProcessDiedError as soon as a rank has ended."""
        while True:
            # A busy rank answers when it is done; a dead one is known at once.
            await self._all("ping")
            await asyncio.sleep(WATCH_EVERY_S)

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

    @property
    def _shard_of_rank(self) -> list[int]:
        return [rank // self._sharing for rank in range(len(self._actors))]

    async def _rank(self, rank: int, method: str, *arguments: Any) -> Any:
        reference = getattr(self._actors[rank], method).remote(*arguments)
        return await answer(reference, process=_label(rank))

    async def _each(self, method: str, shards: Shards) -> list[Any]:
        """Call `method` on each rank with its shard; returns one answer for each shard."""
        answers = await asyncio.gather(
            *(
                self._rank(rank, method, shards[shard])
                for rank, shard in enumerate(self._shard_of_rank)
            )
        )
        return answers[:: self._sharing]

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(
            *(self._rank(rank, method, *arguments) for rank in range(len(self._actors)))
        )


def _label(rank: int) -> str:
    return f"trainer rank {rank}"
