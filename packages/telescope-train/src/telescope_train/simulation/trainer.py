"""Simulated trainer ranks, whose time follows from the FLOPs of their batches."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.file_proofs import FileProof, wrong_contents
from telescope_train.backends.protocol import BatchFacts, RankDiedError
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import PackedBatch, Shards, StepPlan
from telescope_train.batches.binning import sample_costs
from telescope_train.simulation.disk import (
    DiskTimes,
    Learned,
    SimulatedDisk,
    StateWriter,
    Weights,
    read_weights,
)
from telescope_train.simulation.servers import TOKENS_PER_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpeed:
    """Speeds of one rank."""

    tokens_per_s: float = 12_000.0
    """Tokens per second through forward and backward, without attention."""
    hidden_size: int = 4096
    """Hidden size of the model, which sets the relative cost of attention."""
    optimizer_s: float = 0.5
    """Seconds of one optimizer step."""
    send_s: float = 0.5
    """Seconds to send all weights."""
    jitter: float = 0.0
    """Largest random factor on all times."""


class SimulatedRanks:
    """All ranks; see `backends.protocol.Ranks`. They do one thing after the other."""

    def __init__(
        self, num_ranks: int, speed: TrainerSpeed, disk: SimulatedDisk | None = None
    ) -> None:
        """`disk`: the disk for checkpoints; None = writes take no time."""
        self.num_ranks = num_ranks
        self.speed = speed
        self.weights: Weights = ()
        self.busy_s = 0.0
        """Seconds in which the slowest rank was computing."""
        self._disk = disk or SimulatedDisk(DiskTimes())
        self._saving: StateWriter | None = None
        self._gradient: list[PackedBatch] = []
        """The data over which the gradient was accumulated."""
        self._version = 0
        self._working_since_s: float | None = None
        self._died = asyncio.Event()
        self._queue = asyncio.Lock()
        self._chance = random.Random("ranks")

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the present weights."""
        return len(self.weights)

    def die(self) -> None:
        """Fail every later call, and running ones at their end."""
        self._died.set()

    async def start_again(self) -> None:
        """Replace ranks that died, with the initial weights."""
        await self.close()
        self._died.clear()
        self._queue = asyncio.Lock()
        self._take(())

    async def watch(self) -> None:
        """Never return; raises RankDiedError when the ranks die."""
        await self._died.wait()
        raise RankDiedError("trainer ranks died, as planned")

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        """Take the time of all optimizer steps of `plan`."""
        for index in plan.order:
            await self.accumulate_gradient(plan.minibatches[index], version)
            await self.apply_gradient(1.0)
        return {}

    async def accumulate_gradient(self, shards: Shards, version: int) -> None:
        """Take the time of forward and backward passes: in each round, that of the slowest rank."""
        rounds = zip(*shards, strict=True)
        await self._work(sum(max(self._seconds(batch) for batch in one) for one in rounds))
        self._version = version
        self._gradient += (batch for shard in shards for batch in shard)

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take the time of an optimizer step."""
        await self._work(self.speed.optimizer_s)
        self._take((*self.weights, Learned.from_batches(self._version, self._gradient)))
        return {}

    async def take_token_facts(self) -> list[list[BatchFacts]]:
        """Return nothing: tokens are not simulated."""
        return []

    async def logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Take the time of a forward pass; the log-probs are 0."""
        rounds = zip(*shards, strict=True)
        await self._work(sum(max(self._seconds(batch) for batch in one) for one in rounds) / 3)
        return [[np.zeros(len(b.token_ids_T), np.float32) for b in shard] for shard in shards]

    async def reference_logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return log-probs like `logprobs`."""
        return await self.logprobs(shards)

    async def update_reference(self) -> None:
        """Do nothing."""

    async def weight_headers(self) -> list[TensorHeader]:
        """Return one tensor, in place of all."""
        return [TensorHeader(name="weights", dtype="bfloat16", shape=(1,))]

    async def meeting_point(self) -> tuple[str, int]:
        """Return a place that is not used."""
        return "simulated", 0

    async def connect(self, place: Place, *, wait_s: float | None = None) -> None:
        """Do nothing."""

    async def stage_weights(self, wire: Wire) -> None:
        """Do nothing: nothing is staged."""

    async def send_weights(self) -> str:
        """Take the time of a transfer."""
        await self._work(self.speed.send_s)
        return self.digest

    @property
    def digest(self) -> str:
        """Digest that servers report after receiving the weights."""
        return f"after {self.num_steps} steps, the last {self.weights[-1:]}"

    async def sent_digests(self) -> dict[str, str]:
        """Return the digest of the one tensor."""
        return {"weights": self.digest}

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Take the time of a copy, and write it in the background."""
        await self._hold(self._disk.times.copy_s)
        assert self._saving is None, "finish_checkpoint comes first"
        self._saving = StateWriter(folder, self.weights, num_ranks=self.num_ranks, disk=self._disk)

    async def checkpoint_is_written(self) -> bool:
        """Return whether it is written, after the present activity."""
        await self._hold(0.0)
        return self._saving is None or self._saving.is_done

    async def finish_checkpoint(self) -> Mapping[str, FileProof]:
        """Wait for the background write; raises TelescopeError if it failed."""
        await self._hold(0.0)
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving.wait()
        return {}  # they are so small that whoever publishes them reads them

    async def load_checkpoint(self, folder: Path, proofs: Mapping[str, FileProof]) -> None:
        """Load the weights of a checkpoint, in no time."""
        assert not wrong_contents(folder, proofs, proofs)
        await self._hold(0.0)
        self._take(read_weights(folder))

    async def save_pretrained(self, folder: Path) -> None:
        """Write a file in place of the export."""
        await self._hold(0.0)
        self._disk.export(folder, self.digest)

    async def close(self) -> None:
        """Stop the background write."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving.end()

    @property
    def busy_until_now_s(self) -> float:
        """`busy_s`, including the present activity."""
        if self._working_since_s is None:
            return self.busy_s
        return self.busy_s + asyncio.get_running_loop().time() - self._working_since_s

    async def _work(self, seconds: float) -> None:
        async with self._queue:
            seconds *= 1.0 + self.speed.jitter * self._chance.random()
            self._working_since_s = asyncio.get_running_loop().time()
            try:
                await asyncio.sleep(seconds)
            finally:
                self._working_since_s = None
            if self._died.is_set():
                raise RankDiedError("trainer ranks died, as planned")
            self.busy_s += seconds

    def _take(self, weights: Weights) -> None:
        self.weights, self._gradient = weights, []

    async def _hold(self, seconds: float) -> None:
        """Do work outside of a step, after the present activity."""
        async with self._queue:
            if seconds:
                await asyncio.sleep(seconds)
            if self._died.is_set():
                raise RankDiedError("trainer ranks died, as planned")

    def _seconds(self, batch: PackedBatch) -> float:
        lengths_N: NDArray[np.int64] = batch.lengths_S * TOKENS_PER_ID
        if not lengths_N.size:
            return 0.0
        return (
            float(sample_costs(lengths_N, self.speed.hidden_size).sum()) / self.speed.tokens_per_s
        )
