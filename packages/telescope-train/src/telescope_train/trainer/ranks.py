"""All trainer ranks, called together and awaited together: over Ray, or one in this process.

`AllRanks` writes every call of `backends.protocol.Ranks` once, over a way to call one rank by the
name of a method of `TrainerWorker`. `RayRanks` (in `ray_ranks`) and `LocalRanks` differ in nothing
but that way.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.file_proofs import FileProof
from telescope_train.backends.protocol import BatchFacts, RankDiedError
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import Shards, StepPlan
from telescope_train.cluster.rank_layout import ONE_RANK, RankLayout
from telescope_train.diagnostics.rank_checks import SelfTest
from telescope_train.models.attention.choice import PrefixSharing
from telescope_train.trainer.worker import TrainerWorker


class RankFacts(NamedTuple):
    """Facts about a rank whose model is loaded."""

    self_tests: list[SelfTest]
    """Results of the self-tests, all of which passed."""
    gpu_name: str | None
    """Name of the GPU; None on CPU."""
    sharing: PrefixSharing
    """Whether samples of a row share prefixes."""
    activations: str = ""
    """Reason for the number of recomputed layers; empty if the settings fix it."""

    @classmethod
    def from_worker(cls, worker: TrainerWorker) -> "RankFacts":
        """Return the facts of a rank in this process."""
        return cls(worker.self_tests, worker.gpu_name, worker.sharing, worker.activations)


class Rank(Protocol):
    """One trainer rank, wherever it runs."""

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call the method `name` of its `TrainerWorker`."""
        ...

    async def address(self) -> tuple[str, int]:
        """Return (host, port) of its machine, with the port reserved for a meeting."""
        ...


class AllRanks:
    """All ranks together: every call goes to all of them and returns when all have answered."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        facts: Sequence[RankFacts] = (),
        *,
        layout: RankLayout = ONE_RANK,
    ) -> None:
        """`layout`: the rows of each rank, and the ranks that report results for them."""
        self._ranks = list(ranks)
        self.layout = layout
        """Division of the work among ranks."""
        self.facts = list(facts)
        """Facts of each rank, once its model is loaded."""

    @property
    def num_ranks(self) -> int:
        """Number of shards of a step: ranks that share rows count once."""
        return self.layout.num_shards

    @property
    def gpu_name(self) -> str | None:
        """The GPU of each rank; None on CPU."""
        return self.facts[0].gpu_name

    @property
    def activations(self) -> str:
        """Reason for the number of recomputed layers; empty if the settings fix it."""
        return self.facts[0].activations

    @property
    def why_nothing_is_shared(self) -> str | None:
        """Reason why ranks compute samples separately; None = they share prefixes."""
        return next((one.sharing.reason for one in self.facts if one.sharing.reason), None)

    @property
    def self_tests(self) -> list[SelfTest]:
        """The worst result of all ranks in each test."""
        by_test = zip(*(facts.self_tests for facts in self.facts), strict=True)
        return [max(ranks, key=lambda test: test.value) for ranks in by_test]

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        """Take the optimizer steps of `plan`; returns metrics over all of them and all ranks."""
        parts = await self._put_minibatches(
            [plan.of_rank(shard) for shard in range(self.layout.num_shards)]
        )
        order = list(plan.order)
        rows = await asyncio.gather(
            *(
                rank.call("train_minibatches", parts[shard], order, version)
                for rank, shard in zip(self._ranks, self._shard_of_rank, strict=True)
            )
        )
        return rows[0]

    async def accumulate_gradient(self, shards: Shards, version: int) -> None:
        """Add the gradient of `shards` to that of the next `apply_gradient`."""
        await self._each("accumulate_gradient", shards, version)

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take one optimizer step with `scale` times the accumulated gradient; returns metrics."""
        return (await self._all("apply_gradient", scale))[0]

    async def take_token_facts(self) -> list[list[BatchFacts]]:
        """Return and forget the facts about the tokens of the last step, by [shard][batch]."""
        return self._of_speakers(await self._all("take_token_facts"))

    async def logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return logprobs_T, nats, of [rank][batch] under the present weights."""
        return await self._each("logprobs", shards)

    async def reference_logprobs(self, shards: Shards) -> list[list[NDArray[np.float32]]]:
        """Return logprobs_T, nats, of [rank][batch] under the reference model."""
        return await self._each("reference_logprobs", shards)

    async def update_reference(self) -> None:
        """Make the present weights the reference model."""
        await self._all("update_reference")

    async def weight_headers(self) -> list[TensorHeader]:
        """Describe the tensors that `send_weights` sends."""
        return (await self._all("weight_headers"))[0]

    async def meeting_point(self) -> tuple[str, int]:
        """Return (host, port) where servers can meet rank 0."""
        return await self._ranks[0].address()

    async def connect(self, place: Place, *, wait_s: float | None = None) -> None:
        """Open rank 0's end of the weight transfer; `wait_s` limits each wait for a server."""
        await self._ranks[0].call("connect", place, wait_s)

    async def stage_weights(self, wire: Wire) -> None:
        """Gather the weights so that they can be sent without the other ranks."""
        await self._all("stage_weights", wire)

    async def send_weights(self) -> str:
        """Send all weights to all servers; returns their digest.

        If a rank dies, the sending fails on the others too. The death is raised then, because
        nothing can be sent again without the rank.
        """
        sending = [asyncio.ensure_future(rank.call("send_weights")) for rank in self._ranks]
        await asyncio.wait(sending)
        for one in sending:
            if isinstance(one.exception(), RankDiedError):
                await one
        return (await asyncio.gather(*sending))[0]

    async def free_cached_memory(self) -> None:
        """Free GPU memory that holds no tensor, for servers on the same GPU."""
        await self._all("free_cached_memory")

    async def sent_digests(self) -> dict[str, str]:
        """Return the digest of each tensor of the last transfer, by name."""
        return await self._ranks[0].call("sent_digests")

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Copy the state on every rank and start to write it; training may continue."""
        await self._all("start_checkpoint", folder, with_training_state)

    async def checkpoint_is_written(self) -> bool:
        """Return whether every rank has finished its part."""
        return all(await self._all("checkpoint_is_written"))

    async def finish_checkpoint(self) -> dict[str, FileProof]:
        """Wait for all parts; raises if one failed. Returns the files' proofs."""
        written: list[dict[str, FileProof]] = await self._all("finish_checkpoint")
        return {name: proof for proofs in written for name, proof in proofs.items()}

    async def load_checkpoint(self, folder: Path, proofs: Mapping[str, FileProof]) -> None:
        """Continue from the state in `folder`, whose files must match `proofs`."""
        await self._all("load_checkpoint", folder, dict(proofs))

    async def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""
        await self._all("save_pretrained", folder)

    @property
    def _shard_of_rank(self) -> list[int]:
        return [self.layout.shard_of(rank) for rank in range(len(self._ranks))]

    def _of_speakers(self, answers: Sequence[Any]) -> list[Any]:
        return [answers[rank] for rank in self.layout.speakers]

    async def _each(self, method: str, shards: Shards, *arguments: Any) -> list[Any]:
        """Call `method` on each rank with its shard; returns one result per shard."""
        rows = await self._put_rows(shards)
        answers = await asyncio.gather(
            *(
                rank.call(method, rows[shard], *arguments)
                for rank, shard in zip(self._ranks, self._shard_of_rank, strict=True)
            )
        )
        return self._of_speakers(answers)

    async def _put_rows(self, shards: Shards) -> Sequence[Any]:
        """Return the arguments for the ranks of each shard."""
        return shards

    async def _put_minibatches(self, shards: Sequence[Shards]) -> Sequence[Any]:
        """Return the arguments for the ranks of each shard, with its part of the minibatches."""
        return shards

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(rank.call(method, *arguments) for rank in self._ranks))


class _LocalRank:
    """A rank in a thread of this process, so that the event loop goes on while it computes."""

    def __init__(self, worker: TrainerWorker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer-rank")

    async def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._worker, name)
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, *arguments)

    async def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._worker.held_port.hold()

    def close(self) -> None:
        self._thread.shutdown()  # a call in progress ends first
        self._worker.close()


class LocalRanks(AllRanks):
    """A single rank in this process."""

    def __init__(self, worker: TrainerWorker) -> None:
        self.worker = worker
        self._rank = _LocalRank(worker)
        super().__init__([self._rank], [RankFacts.from_worker(worker)])

    async def close(self) -> None:
        """Leave the process group. Idempotent."""
        self._rank.close()
