"""All trainer ranks, called together and awaited together: over Ray, or one in this process.

`AllRanks` writes every call of `backends.protocol.Ranks` once, over a way to call one rank by the
name of a method of `TrainerWorker`. `RayRanks` and `LocalRanks` differ in nothing but that way.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from telescope_core.errors import NoRoomError, ProcessDiedError
from telescope_core.records.logs import Logs, telling_failure
from telescope_train.backends.protocol import (
    BackendSettings,
    BatchFacts,
    RankDiedError,
)
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.batches.batch import Shards, StepPlan
from telescope_train.cluster.ports import HeldPort
from telescope_train.cluster.rank_layout import ONE_RANK, RankLayout
from telescope_train.cluster.ray_cluster import answer
from telescope_train.diagnostics.rank_checks import SelfTest
from telescope_train.observability.timeline import TakenSpans, TimedRank
from telescope_train.trainer.worker import Meeting, Progress, TrainerWorker

_LOGGER = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
WATCHING = "watching"
"""Name of the thread of a rank that answers questions about its progress."""
COLLECTIVE_TIMEOUTS = 3
"""Timeouts for which ranks wait for each other: one that stands still is found after two."""


class RankFacts(NamedTuple):
    """What a rank says of itself once its model is loaded."""

    self_tests: list[SelfTest]
    """All of them passed."""
    gpu_name: str | None
    """None on CPU."""

    @classmethod
    def of(cls, worker: TrainerWorker) -> "RankFacts":
        """Return the facts of a rank in this process."""
        return cls(worker.self_tests, worker.gpu_name)


class Rank(Protocol):
    """One trainer rank, wherever it runs."""

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call the method `name` of its `TrainerWorker`."""
        ...

    async def address(self) -> tuple[str, int]:
        """Return (host, port) of its machine, held for others to meet at."""
        ...


class AllRanks:
    """Every call is collective: it goes to all ranks at once and returns when all have answered."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        facts: Sequence[RankFacts] = (),
        *,
        layout: RankLayout = ONE_RANK,
    ) -> None:
        """`layout` says which rows each rank takes and which rank answers for them."""
        self._ranks = list(ranks)
        self.layout = layout
        """How the ranks divide the work."""
        self.facts = list(facts)
        """Of each rank, once its model is loaded."""

    @property
    def num_ranks(self) -> int:
        """How many shards a step has: ranks that share rows count once."""
        return self.layout.num_shards

    @property
    def gpu_name(self) -> str | None:
        """The GPU of each rank; None on CPU."""
        return self.facts[0].gpu_name

    @property
    def self_tests(self) -> list[SelfTest]:
        """The worst of all ranks in each test."""
        by_test = zip(*(facts.self_tests for facts in self.facts), strict=True)
        return [max(ranks, key=lambda test: test.value) for ranks in by_test]

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        """Take the optimizer steps of `plan`; returns metrics over all of them and all ranks."""
        order = list(plan.order)
        rows = await asyncio.gather(
            *(
                rank.call("train_minibatches", plan.of_rank(shard), order, version)
                for rank, shard in zip(self._ranks, self._shard_of_rank, strict=True)
            )
        )
        return rows[0]

    async def accumulate_gradient(self, shards: Shards, version: int) -> None:
        """Add the gradient of `shards` to that of the next `apply_gradient`."""
        await self._each("accumulate_gradient", shards, version)

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take one optimizer step with `scale` times what was accumulated; returns metrics."""
        return (await self._all("apply_gradient", scale))[0]

    async def take_token_facts(self) -> list[list[BatchFacts]]:
        """Return what the last step found of its tokens, by [shard][batch], and forget it."""
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
        """Gather the weights where they can be sent from without the ranks' help."""
        await self._all("stage_weights", wire)

    async def send_weights(self) -> str:
        """Send all weights to all servers; returns their digest.

        A rank that dies makes the sending fail on the others. Its death is what is raised then:
        without it there is nothing to be sent again.
        """
        sending = [asyncio.ensure_future(rank.call("send_weights")) for rank in self._ranks]
        await asyncio.wait(sending)
        for one in sending:
            if isinstance(one.exception(), RankDiedError):
                await one
        return (await asyncio.gather(*sending))[0]

    async def free_cached_memory(self) -> None:
        """Give memory of GPUs that no tensor is in back, for servers that share them."""
        await self._all("free_cached_memory")

    async def sent_digests(self) -> dict[str, str]:
        """Return the digest of each tensor that was sent last, by name."""
        return await self._ranks[0].call("sent_digests")

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Copy the state on every rank and begin to write it; training may go on."""
        await self._all("start_checkpoint", folder, with_training_state)

    async def checkpoint_is_written(self) -> bool:
        """Return whether every rank is done with its part."""
        return all(await self._all("checkpoint_is_written"))

    async def finish_checkpoint(self) -> None:
        """Wait for all parts; raises when one could not be written."""
        await self._all("finish_checkpoint")

    async def load_checkpoint(self, folder: Path) -> None:
        """Continue from the state in `folder`, whatever number of ranks wrote it."""
        await self._all("load_checkpoint", folder)

    async def save_pretrained(self, folder: Path) -> None:
        """Write the model in Hugging Face format."""
        await self._all("save_pretrained", folder)

    @property
    def _shard_of_rank(self) -> list[int]:
        return [self.layout.shard_of(rank) for rank in range(len(self._ranks))]

    def _of_speakers(self, answers: Sequence[Any]) -> list[Any]:
        return [answers[rank] for rank in self.layout.speakers]

    async def _each(self, method: str, shards: Shards, *arguments: Any) -> list[Any]:
        """Call `method` on each rank with its shard; returns one answer for each shard."""
        answers = await asyncio.gather(
            *(
                rank.call(method, shards[shard], *arguments)
                for rank, shard in zip(self._ranks, self._shard_of_rank, strict=True)
            )
        )
        return self._of_speakers(answers)

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(rank.call(method, *arguments) for rank in self._ranks))


class RankActor:
    """One trainer rank in a process of its own."""

    def __init__(self, number: int, logs: Logs) -> None:
        with suppress(OSError):
            # Another machine than the driver's may not have it yet.
            logs.folder.mkdir(parents=True, exist_ok=True)
        logs.begin("trainer", f"rank {number}")
        self._worker: TrainerWorker | None = None
        self._progress = Progress()
        self._held_port = HeldPort()

    # In a thread of its own, so that it answers while a call computes.
    @ray.method(concurrency_group=WATCHING)
    def signs_of_life(self) -> int:
        """Return a number that grows with every batch, tensor and file that is done."""
        return self._progress.count

    @ray.method(concurrency_group=WATCHING)
    def taken_spans(self) -> TakenSpans:
        """Return what the rank did since it was asked last."""
        if self._worker is None:
            return TakenSpans(time.monotonic(), [])
        return self._worker.spans.take()

    def address(self) -> tuple[str, int]:
        """Return (host, port) of this node, where nothing else can listen from now on."""
        return ray.util.get_node_ip_address(), self._held_port.hold()

    def open(self, settings: BackendSettings, *, meeting: Meeting, num_threads: int) -> RankFacts:
        """Load the model."""
        with telling_failure(_LOGGER, "loading the model"):
            self._worker = TrainerWorker(
                settings,
                meeting=meeting,
                num_threads=num_threads,
                progress=self._progress,
                held_port=self._held_port,
            )
        facts = RankFacts.of(self._worker)
        for test in facts.self_tests:
            _LOGGER.info("self-test passed: %s", test.text)
        return facts

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the method `name` of the rank."""
        assert self._worker is not None, "open comes first"
        with telling_failure(_LOGGER, name):
            return getattr(self._worker, name)(*arguments)


class _SharedProgress:
    """Whether any rank moves on: the others wait for it in a collective."""

    def __init__(self, timeout_s: float) -> None:
        self.ranks: list[_RayRank] = []
        self.mute: list[str] = []
        """Ranks that did not even answer the last question."""
        self._timeout_s = timeout_s

    async def signs_of_life(self) -> int:
        """Return a number that grows with what any rank does."""
        counts = await asyncio.gather(*(self._of(one) for one in self.ranks))
        self.mute = [
            one.process for one, count in zip(self.ranks, counts, strict=True) if count is None
        ]
        return sum(count or 0 for count in counts)

    async def _of(self, rank: "_RayRank") -> int | None:
        try:
            # Less than the timeout: the caller waits for the answers of all.
            async with asyncio.timeout(self._timeout_s / 2):
                return await rank.actor.signs_of_life.remote()
        except (TimeoutError, RayError):
            return None


class _RayRank:
    """A `RankActor`, seen from the driver."""

    def __init__(
        self, actor: Any, number: int, progress: _SharedProgress, timeout_s: float
    ) -> None:
        self.actor = actor
        self.process = f"trainer rank {number}"
        self._progress = progress
        self._timeout_s = timeout_s

    async def call(self, name: str, *arguments: Any) -> Any:
        with _faults_of_ray(self.process):
            # Large arguments are copied to Ray's object store here.
            reference = self.actor.call.remote(name, *arguments)
        return await self.answer(reference)

    async def address(self) -> tuple[str, int]:
        return await self.answer(self.actor.address.remote())

    async def taken_spans(self) -> TakenSpans:
        try:
            return await self.actor.taken_spans.remote()
        except RayError as error:
            raise ProcessDiedError(f"{self.process} does not answer: {error}") from None

    async def answer(self, reference: Any) -> Any:
        try:
            with _faults_of_ray(self.process):
                return await answer(
                    reference,
                    process=self.process,
                    watched=self._progress,
                    timeout_s=self._timeout_s,
                )
        except ProcessDiedError as error:
            mute = self._progress.mute
            hint = f" ({', '.join(mute)} does not answer at all)" if mute else ""
            raise RankDiedError(f"{error}{hint}") from None


@contextmanager
def _faults_of_ray(process: str) -> Iterator[None]:
    """Raise what a fault of Ray itself means for a call of `process`.

    If an object was lost on its way, nobody knows whether the call was made, so that rank counts as
    dead: all go back to a checkpoint. Where there is no room for it, starting again would not help.
    """
    try:
        yield
    except RayError as error:
        # What fails in the actor, such as reading an argument, comes with its traceback.
        cause = error.cause if isinstance(error, RayTaskError) else error
        why = str(cause).strip().partition("\n")[0]
        if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
            raise NoRoomError(
                f"Ray has no room for a batch or an answer of {process}: {why}; free space in the "
                "folder of Ray's session (/tmp, unless the cluster was started with another one), "
                "and continue with --resume"
            ) from None
        if not isinstance(cause, RayError):
            raise
        raise RankDiedError(
            f"the connection to {process} was lost: {type(cause).__name__}: {why}"
        ) from None


class RayRanks(AllRanks):
    """One Ray actor for each rank."""

    def __init__(
        self,
        places: Sequence[dict[str, Any]],
        logs: Logs,
        *,
        timeout_s: float,
        layout: RankLayout = ONE_RANK,
    ) -> None:
        """Start one process per place, which writes to `logs`; `open` loads the model.

        Ranks that make no progress for `timeout_s` seconds are taken for dead.
        """
        assert len(places) == layout.num_ranks, "one place for each rank of the layout"
        super().__init__((), layout=layout)
        self._places = list(places)
        self._logs = logs
        self._timeout_s = timeout_s
        self._processes: list[_RayRank] = []
        self._start()

    def _start(self) -> None:
        progress = _SharedProgress(self._timeout_s)
        actor_class = ray.remote(concurrency_groups={WATCHING: 1})(RankActor)
        self._processes = [
            _RayRank(
                actor_class.options(**place).remote(number, self._logs),
                number,
                progress,
                self._timeout_s,
            )
            for number, place in enumerate(self._places)
        ]
        progress.ranks = self._processes
        self._ranks = list[Rank](self._processes)

    async def start_again(self, settings: BackendSettings, *, num_threads: int) -> None:
        """End all ranks, dead or alive, and load the model on new ones in their places."""
        await self.close()
        self._start()
        await self.open(settings, num_threads=num_threads)

    async def open(self, settings: BackendSettings, *, num_threads: int) -> None:
        """Load the model on every rank, each with `num_threads` threads on a CPU."""
        host, port = await self.meeting_point()
        self.facts = await asyncio.gather(
            *(
                one.answer(
                    one.actor.open.remote(
                        settings,
                        meeting=Meeting(
                            rank=rank,
                            world_size=len(self._processes),
                            address=host,
                            port=port,
                            wait_s=COLLECTIVE_TIMEOUTS * self._timeout_s,
                        ),
                        num_threads=num_threads,
                    )
                )
                for rank, one in enumerate(self._processes)
            )
        )

    @property
    def timed(self) -> Sequence[TimedRank]:
        """The ranks that there are now, as far as they say what they did."""
        return self._processes

    async def watch(self) -> None:
        """Never return; raises RankDiedError as soon as a rank has ended."""
        while True:
            # A busy rank answers when it is done; a dead one is known at once.
            await asyncio.gather(
                *(one.answer(one.actor.__ray_ready__.remote()) for one in self._processes)
            )
            await asyncio.sleep(WATCH_EVERY_S)

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for one in self._processes:
            with suppress(RayError):  # a node that died has taken the rank with it
                ray.kill(one.actor)


class _LocalRank:
    """A rank in this process, in a thread of its own: the event loop goes on while it computes."""

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
        super().__init__([self._rank], [RankFacts.of(worker)])

    async def close(self) -> None:
        """Leave the process group. Idempotent."""
        self._rank.close()
