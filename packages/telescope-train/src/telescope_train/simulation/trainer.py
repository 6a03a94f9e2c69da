"""Simulated trainer ranks, whose time follows from the FLOPs of their batches."""

import asyncio
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telescope_train.backends.protocol import BatchFacts
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import PackedBatch, Shards, StepPlan
from telescope_train.batches.binning import sample_costs
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
    """All ranks; see `backends.protocol.Ranks`. They do one thing at a time, and save nothing."""

    def __init__(self, num_ranks: int, speed: TrainerSpeed) -> None:
        self.num_ranks = num_ranks
        self.speed = speed
        self.num_steps = 0
        """Number of optimizer steps of the present weights."""
        self.busy_s = 0.0
        """Seconds in which the slowest rank was computing."""
        self._working_since_s: float | None = None
        self._queue = asyncio.Lock()
        self._chance = random.Random("ranks")

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

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take the time of an optimizer step."""
        await self._work(self.speed.optimizer_s)
        self.num_steps += 1
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
        return f"after {self.num_steps} steps"

    async def sent_digests(self) -> dict[str, str]:
        """Return the digest of the one tensor."""
        return {"weights": self.digest}

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
            self.busy_s += seconds

    def _seconds(self, batch: PackedBatch) -> float:
        lengths_N: NDArray[np.int64] = batch.lengths_S * TOKENS_PER_ID
        if not lengths_N.size:
            return 0.0
        return (
            float(sample_costs(lengths_N, self.speed.hidden_size).sum()) / self.speed.tokens_per_s
        )
