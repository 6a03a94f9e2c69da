"""The trainer ranks as Ray actors: one process each, on any node, numbered by node and GPU."""

import asyncio
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from telescope_core.base.errors import NoRoomError, ProcessDiedError
from telescope_core.records.logs import Logs
from telescope_train.backends.protocol import BackendSettings, GpuMemoryError, RankDiedError
from telescope_train.batches.batch import PackedBatch, Shards
from telescope_train.cluster.network import Network
from telescope_train.cluster.nodes import Stages, all_nodes, stages
from telescope_train.cluster.placement import RankRoom, in_order_of_nodes
from telescope_train.cluster.rank_layout import ONE_RANK, RankLayout
from telescope_train.cluster.ray_cluster import UnreachableError, answer, is_back
from telescope_train.cluster.supervision import cancel
from telescope_train.observability.timeline import TakenSpans, TimedRank
from telescope_train.trainer.rank_actor import WATCHING, RankActor, RankPlace
from telescope_train.trainer.ranks import AllRanks, Rank, RankFacts
from telescope_train.trainer.worker import WATCHED_WAIT_S, Meeting, TrainerWorker

_LOGGER = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
_ACTIVITY_S = 2.0
"""Longest wait for what a rank says it is doing."""


class _SharedProgress:
    """Progress of all ranks together, because they wait for each other in collectives."""

    def __init__(self, timeout_s: float, look: Stages = stages) -> None:
        self.ranks: list[_RayRank] = []
        self.mute: list[str] = []
        """Ranks that did not answer the last question."""
        self._timeout_s = timeout_s
        self._look = look
        self._seen: Hashable = None
        self._num_changes = -1
        """Number of changes; -1 before the first look, which has nothing to compare with."""

    async def signs_of_life(self) -> int:
        """Return a number that changes with any rank's work, or the cluster's to start one."""
        counts = await asyncio.gather(*(self._of(one) for one in self.ranks))
        self.mute = [
            one.process for one, count in zip(self.ranks, counts, strict=True) if count is None
        ]
        if self.mute:
            # One that the cluster has not started yet answers nothing.
            seen = await asyncio.to_thread(self._look)
            self._num_changes += self._num_changes < 0 or seen != self._seen
            self._seen = seen
        return sum(count or 0 for count in counts) + max(0, self._num_changes)

    async def _of(self, rank: "_RayRank") -> int | None:
        try:
            # Less than the timeout: the caller waits for the answers of all.
            async with asyncio.timeout(self._timeout_s / 2):
                return await rank.actor.signs_of_life.remote()
        except (TimeoutError, RayError):
            return None


class _RayRank:
    """A `RankActor`, from the driver's point of view."""

    def __init__(
        self, actor: Any, number: int, progress: _SharedProgress, timeout_s: float
    ) -> None:
        self.actor = actor
        self.process = f"trainer rank {number}"
        self._progress = progress
        self._timeout_s = timeout_s

    async def call(self, name: str, *arguments: Any) -> Any:
        with _faults_of_ray(self.process):
            # References among the arguments are what they refer to when the call is made.
            reference = self.actor.call.remote(name, *arguments)
        return await self.answer(reference)

    async def address(self) -> tuple[str, int]:
        return await self.answer(self.actor.address.remote())

    async def taken_spans(self) -> TakenSpans:
        try:
            return await self.actor.taken_spans.remote()
        except RayError as error:
            raise ProcessDiedError(f"{self.process} does not answer: {error}") from None

    async def activity(self) -> str:
        """Return what it does before it is open; "" if it is, or does not answer now."""
        try:
            async with asyncio.timeout(_ACTIVITY_S):
                return await self.actor.activity.remote()
        except (TimeoutError, RayError):
            return ""

    async def until_ended(self) -> None:
        """Never return; raises RankDiedError as soon as the process has ended."""
        while True:
            with suppress(UnreachableError):
                # A busy rank answers when it is done; a dead one is known at once.
                await self._answer(self.actor.__ray_ready__.remote())
                await asyncio.sleep(WATCH_EVERY_S)
                continue
            # While nothing is asked of it, nothing is lost with a connection that comes back.
            if not await self._is_back():
                raise RankDiedError(f"{self.process} cannot be reached any more")

    async def answer(self, reference: Any) -> Any:
        """Return an answer of the rank; raises RankDiedError if there will be none."""
        try:
            return await self._answer(reference)
        except UnreachableError as error:
            # Whether the call was made is open, so all ranks go back to a checkpoint. Before they
            # are placed anew, Ray must know whether the node is gone.
            fate = "answers again" if await self._is_back() else "is gone"
            raise RankDiedError(f"{error}; what it did is not known, and it {fate}") from None

    async def _is_back(self) -> bool:
        return await is_back(self.actor.signs_of_life.remote)

    async def _answer(self, reference: Any) -> Any:
        try:
            with _faults_of_ray(self.process):
                return await answer(
                    reference,
                    process=self.process,
                    watched=self._progress,
                    timeout_s=self._timeout_s,
                )
        except UnreachableError:
            raise
        except ProcessDiedError as error:
            mute = self._progress.mute
            hint = f" ({', '.join(mute)} does not answer at all)" if mute else ""
            raise RankDiedError(f"{error}{hint}") from None


@contextmanager
def _faults_of_ray(process: str) -> Iterator[None]:
    """Raise the error that a fault of Ray means for a call of `process`.

    If an object was lost on its way, it is unknown whether the call was made, so that rank counts
    as dead, and all ranks go back to a checkpoint. If there was no room for the object, starting
    again would not help.
    """
    try:
        yield
    except RayError as error:
        # Errors in the actor, such as in reading an argument, come with a traceback.
        cause = error.cause if isinstance(error, RayTaskError) else error
        why = str(cause).strip().partition("\n")[0]
        if isinstance(cause, torch.OutOfMemoryError):
            raise GpuMemoryError.of(process, cause) from None
        if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
            raise NoRoomError(
                f"Ray has no room for a batch or an answer of {process}: {why}; free space in the "
                "folder of Ray's session (/tmp, unless the cluster was started with another one)"
            ) from None
        if isinstance(cause, OSError) and not isinstance(cause, RayError):
            # Ray's error is of this class too, but without the number and the path.
            raise cause from error
        if not isinstance(cause, RayError):
            raise
        raise RankDiedError(
            f"the connection to {process} was lost: {type(cause).__name__}: {why}"
        ) from None


def in_order_of_places(places: Sequence[RankPlace]) -> list[int]:
    """Return the indices of `places` sorted by node, and then by GPU."""
    order = in_order_of_nodes([place.node for place in places])
    first = {places[index].node: rank for rank, index in reversed(list(enumerate(order)))}
    return sorted(order, key=lambda index: (first[places[index].node], places[index].gpus))


class RayRanks(AllRanks):
    """One Ray actor for each rank."""

    def __init__(
        self,
        room: RankRoom,
        logs: Logs,
        *,
        network: Network,
        timeout_s: float,
        layout: RankLayout = ONE_RANK,
    ) -> None:
        """Start a process at each place of `room`, which logs to `logs`; `open` loads the model.

        Ranks without progress for `timeout_s` seconds count as dead.
        """
        super().__init__((), layout=layout)
        self._room = room
        self._network = network
        self._logs = logs
        self._timeout_s = timeout_s
        self._processes: list[_RayRank] = []
        self._start()

    def _start(self) -> None:
        progress = _SharedProgress(self._timeout_s)
        actor_class = ray.remote(concurrency_groups={WATCHING: 1})(RankActor)
        self._processes = [
            _RayRank(
                actor_class.options(**place).remote(
                    self._logs, self._network, owns_gpu=place.get("num_gpus") == 1
                ),
                number,
                progress,
                self._timeout_s,
            )
            for number, place in enumerate(self._room.places())
        ]
        progress.ranks = self._processes
        self._ranks = list[Rank](self._processes)

    async def start_again(self, settings: BackendSettings, *, num_threads: int) -> None:
        """End all ranks, dead or alive, and load the model on new ones.

        They are where the old ones were, or elsewhere if a node is gone. Raises ConfigError if
        there is no room for them.
        """
        await self.close()
        await self._room.renew()
        self._start()
        await self.open(settings, num_threads=num_threads)

    async def prepare(self) -> None:
        """Import all that `open` needs on every rank, and touch no GPU."""
        calls = [one.answer(one.actor.prepare.remote(TrainerWorker)) for one in self._processes]
        await asyncio.gather(*calls)

    async def activities(self) -> list[str]:
        """Return what each rank that is not open yet is doing."""
        found = await asyncio.gather(*(one.activity() for one in self._processes))
        return [activity for activity in found if activity]

    async def open(self, settings: BackendSettings, *, num_threads: int) -> None:
        """Load the model on every rank, each with `num_threads` threads on a CPU."""
        await self._put_in_order()
        host, port = await self.meeting_point()

        async def opened(one: _RayRank, rank: int) -> RankFacts:
            meeting = Meeting(
                rank=rank,
                world_size=len(self._processes),
                address=host,
                port=port,
                wait_s=WATCHED_WAIT_S,
            )
            opens = partial(TrainerWorker, settings, meeting=meeting, num_threads=num_threads)
            await one.answer(one.actor.open.remote(rank, opens))
            return await one.answer(one.actor.ask.remote(RankFacts.from_worker))

        self.facts = await asyncio.gather(
            *(opened(one, rank) for rank, one in enumerate(self._processes))
        )

    async def _put_in_order(self) -> None:
        """Number the ranks by node and GPU: neighbors share the fastest links."""
        places = await asyncio.gather(
            *(one.answer(one.actor.place.remote()) for one in self._processes)
        )
        order = in_order_of_places(places)
        nodes = [] if self._network.is_local else await asyncio.to_thread(all_nodes)
        labels = {node.id: node.label for node in nodes}
        self._processes[:] = [self._processes[index] for index in order]
        self._ranks = list[Rank](self._processes)
        for number, (one, index) in enumerate(zip(self._processes, order, strict=True)):
            # Where all of them are on this machine, its name says nothing.
            where = "" if self._network.is_local else f" on {labels[places[index].node]}"
            one.process = f"trainer rank {number}{where}"
            _LOGGER.info("%s runs", one.process)

    async def _put_rows(self, shards: Shards) -> Sequence[Any]:
        with _faults_of_ray("the trainer ranks"):
            return await put_rows(shards)

    async def _put_minibatches(self, shards: Sequence[Shards]) -> Sequence[Any]:
        with _faults_of_ray("the trainer ranks"):
            return await put_minibatches(shards)

    @property
    def timed(self) -> Sequence[TimedRank]:
        """The present ranks that report their spans."""
        return self._processes

    async def watch(self) -> None:
        """Never return; raises RankDiedError as soon as a rank has ended."""
        watches = [asyncio.create_task(one.until_ended()) for one in self._processes]
        try:
            await asyncio.gather(*watches)
        finally:
            await cancel(watches)

    async def close(self) -> None:
        """End the processes. Idempotent."""
        for one in self._processes:
            with suppress(RayError):  # a node that died has taken the rank with it
                ray.kill(one.actor)


async def put_rows(shards: Sequence[Sequence[PackedBatch]]) -> list[Any]:
    """Return a reference to the batches of each shard, [batch], in Ray's object store.

    They are written once, in a thread beside the event loop. A rank on the same machine reads them
    where they lie; one elsewhere has its node fetch them. So the number of tokens in a step is no
    work for the event loop, and ranks that share rows share one copy.
    """
    return await asyncio.to_thread(lambda: [ray.put(without_origins(one)) for one in shards])


async def put_minibatches(shards: Sequence[Sequence[Sequence[PackedBatch]]]) -> list[Any]:
    """Return a reference to the batches of each shard, [minibatch][batch]."""
    return await asyncio.to_thread(
        lambda: [ray.put([without_origins(part) for part in shard]) for shard in shards]
    )


def without_origins(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return `batches` without fields only for records, which hold Python objects per sample."""
    return [replace(batch, origins=()) for batch in batches]
