"""When ranks count as dead: none of them moves on. One that waits for a slow one is not."""

import asyncio
import errno
import math
import os
import sys
from collections.abc import Awaitable, Callable, Hashable
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from tests.actors import Answering, Holder

from telescope_core.errors import ConfigError, NoRoomError
from telescope_core.records.logs import Logs
from telescope_train.backends.protocol import GpuMemoryError, RankDiedError, TransferMemoryError
from telescope_train.cluster.network import Network
from telescope_train.cluster.nodes import stages
from telescope_train.cluster.placement import Bundle
from telescope_train.cluster.ports import HeldPort
from telescope_train.cluster.ray_cluster import UNREACHABLE_S, ray_cluster
from telescope_train.config.schema import RaySection
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.trainer import worker
from telescope_train.trainer.rank_actor import ALLOCATOR_VARIABLES, RankActor
from telescope_train.trainer.ray_ranks import _RayRank, _SharedProgress
from telescope_train.trainer.worker import Meeting

TIMEOUT_S = 10.0


class Actor:
    """Says how far it is; the handle and the method of it in one."""

    def __init__(self, *, counts_until_s: float = 0.0, is_mute: bool = False) -> None:
        self._counts_until_s = counts_until_s
        self._is_mute = is_mute

    @property
    def signs_of_life(self) -> "Actor":
        return self

    async def remote(self) -> int:
        if self._is_mute:
            await asyncio.Event().wait()
        return int(min(asyncio.get_running_loop().time(), self._counts_until_s))


def nothing() -> None:
    """Show nothing that the cluster does."""


async def silent_after_s(*actors: Any, look: Callable[[], Hashable] = nothing) -> tuple[float, str]:
    """Wait for an answer that never comes; returns when that ended, and how."""
    loop = asyncio.get_running_loop()
    progress = _SharedProgress(TIMEOUT_S, look)
    progress.ranks = [_RayRank(one, n, progress, TIMEOUT_S) for n, one in enumerate(actors)]
    try:
        await progress.ranks[0].answer(loop.create_future())
    except RankDiedError as error:
        return loop.time(), f"{type(error).__name__}: {error}"
    raise AssertionError("it was answered")


def test_a_rank_that_waits_for_a_slow_one_is_not_dead() -> None:
    async def main() -> tuple[float, str]:
        return await silent_after_s(Actor(), Actor(counts_until_s=95.0))

    ended_s, error = run_in_virtual_time(main)
    assert 95 < ended_s < 95 + 3 * TIMEOUT_S
    assert error.startswith("RankDiedError: trainer rank 0 made no progress for 10 s")


def test_the_rank_that_hangs_is_named() -> None:
    async def main() -> tuple[float, str]:
        return await silent_after_s(Actor(), Actor(is_mute=True))

    ended_s, error = run_in_virtual_time(main)
    assert ended_s <= 3 * TIMEOUT_S
    assert "trainer rank 1 does not answer at all" in error


def test_ranks_may_take_any_time_to_be_started_while_the_cluster_does_something() -> None:
    async def main() -> tuple[float, str]:
        clock = asyncio.get_running_loop()
        started = Actor(is_mute=True), Actor(is_mute=True)
        return await silent_after_s(*started, look=lambda: min(clock.time(), 95.0))

    ended_s, error = run_in_virtual_time(main)
    assert 95 < ended_s < 95 + 4 * TIMEOUT_S
    assert "trainer rank 0, trainer rank 1 does not answer at all" in error


def test_what_a_process_imports_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in a thread, while another one imports torch."""
    rank = RankActor(Logs(folder=Path("logs")), Network(is_local=True))
    before = rank.signs_of_life()
    monkeypatch.setitem(sys.modules, "a_new_module", ModuleType("a_new_module"))
    assert rank.signs_of_life() > before


def test_a_rank_alone_on_its_gpu_may_grow_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings_with(*, owns_gpu: bool, **set_before: str) -> dict[str, str]:
        for name in ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in set_before.items():
            monkeypatch.setenv(name, value)
        RankActor(Logs(folder=Path("logs")), Network(is_local=True), owns_gpu=owns_gpu)
        return {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}

    grows = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert settings_with(owns_gpu=True) == grows
    # Such memory cannot be shown to the server that is on the same GPU.
    assert settings_with(owns_gpu=False) == {}
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert settings_with(owns_gpu=True, **own) == own


def test_a_rank_says_what_it_does_until_it_is_open() -> None:
    rank = RankActor(Logs(folder=Path("logs")), Network(is_local=True))
    assert rank.activity() == "importing its libraries"
    rank.prepare(lambda: None)
    assert rank.activity() == ""


class CutOff:
    """An actor to which the connection is lost until `back_s`, or whose node is dead by then."""

    def __init__(self, *, back_s: float = math.inf, dead_s: float = math.inf) -> None:
        self._back_s, self._dead_s = back_s, dead_s
        self.call = self.signs_of_life = self.__ray_ready__ = SimpleNamespace(remote=self._ask)

    async def _ask(self, *arguments: Any) -> int:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._dead_s:
            raise ActorDiedError
        if now_s < self._back_s:
            raise ActorUnavailableError("the connection is reset", b"ab" * 8)
        return 7


@pytest.mark.parametrize(
    ("actor", "ends_s", "fate"),
    [
        (CutOff(back_s=20.0), 20.0, "it answers again"),
        (CutOff(dead_s=30.0), 30.0, "it is gone"),
        (CutOff(), UNREACHABLE_S, "it is gone"),
    ],
)
def test_a_call_whose_connection_is_lost_ends_once_the_fate_of_its_rank_is_known(
    actor: CutOff, ends_s: float, fate: str
) -> None:
    """New ranks would be placed on a node of which Ray does not know yet that it is dead."""

    async def main() -> None:
        rank = _RayRank(actor, 0, _SharedProgress(TIMEOUT_S), TIMEOUT_S)
        with pytest.raises(RankDiedError, match=f"connection to trainer rank 0 was lost.*{fate}"):
            await rank.call("train_minibatches")
        assert ends_s <= asyncio.get_running_loop().time() <= ends_s + 2

    run_in_virtual_time(main)


@pytest.mark.parametrize("dead_s", [100.0, math.inf])
def test_a_rank_of_which_nothing_is_asked_may_be_unreachable_for_a_while(dead_s: float) -> None:
    async def main() -> None:
        rank = _RayRank(CutOff(back_s=20.0, dead_s=dead_s), 0, _SharedProgress(60.0), 60.0)
        with pytest.raises(RankDiedError if dead_s == 100.0 else TimeoutError):
            async with asyncio.timeout(200.0):
                await rank.until_ended()
        assert asyncio.get_running_loop().time() >= min(dead_s, 200.0)

    run_in_virtual_time(main)


def test_ranks_wait_for_each_other_as_long_as_somebody_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they meet and in collectives: no total ends a rank that waits for a slow one."""
    waits: list[timedelta] = []

    def meets(*_: Any, timeout: timedelta, **__: Any) -> None:
        waits.append(timeout)

    monkeypatch.setattr(worker.dist, "TCPStore", meets)
    monkeypatch.setattr(worker.dist, "init_process_group", meets)
    for wait_s in (worker.UNWATCHED_WAIT_S, worker.WATCHED_WAIT_S):
        meeting = Meeting(rank=1, world_size=2, port=1, wait_s=wait_s)
        worker._join(torch.device("cpu"), meeting, HeldPort())
    assert [one.total_seconds() for one in waits] == [600.0, 600.0, 2_592_000.0, 2_592_000.0]


def in_the_actor(cause: Exception) -> RayTaskError:
    """What fails in the process of a rank, as it arrives."""
    return RayTaskError("call", f"Traceback\n{cause}", cause)


LOST = ObjectLostError("ab" * 14, "", "")
FULL = ObjectStoreFullError("no room for 2 GB")
TOO_LARGE = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.20 GiB is free. Process 7 has 77.90 GiB memory in use. Of the allocated memory 70.00 "
    "GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True."
)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (LOST, RankDiedError, "connection to trainer rank 0 was lost: ObjectLostError: Failed to"),
        (OwnerDiedError("ab" * 14, "", ""), RankDiedError, "was lost: OwnerDiedError"),
        (RaySystemError("the raylet is gone"), RankDiedError, "was lost: RaySystemError"),
        (in_the_actor(LOST), RankDiedError, "was lost: ObjectLostError"),
        (FULL, NoRoomError, "Ray has no room for a batch or an answer of trainer rank 0: no room"),
        (OutOfDiskError("the disk is full"), NoRoomError, "free space in .* with another one"),
        (in_the_actor(FULL), NoRoomError, "Ray has no room"),
        (in_the_actor(ConfigError("lower it")), ConfigError, "^lower it$"),
        (
            in_the_actor(TOO_LARGE),
            GpuMemoryError,
            "^trainer rank 0 ran out of GPU memory: Tried to allocate 2.50 GiB. GPU 0 has a total "
            "capacity of 79.11 GiB of which 1.20 GiB is free$",
        ),
        (in_the_actor(torch.OutOfMemoryError("no room")), GpuMemoryError, "memory: no room$"),
        (in_the_actor(TransferMemoryError("in use")), TransferMemoryError, "^in use$"),
        (in_the_actor(NoRoomError("full")), NoRoomError, "^full$"),
        (
            in_the_actor(PermissionError(errno.EACCES, "Permission denied", "/closed")),
            PermissionError,
            r"^\[Errno 13\] Permission denied: '/closed'$",
        ),
        (in_the_actor(ValueError("a defect")), RayTaskError, "a defect"),
    ],
)
@pytest.mark.parametrize("is_sent", [True, False])
async def test_what_a_fault_of_ray_means_for_a_run(
    error: RayError, expected: type[Exception], message: str, is_sent: bool
) -> None:
    """Also when a call cannot be made, because its arguments have no room."""
    reference = asyncio.get_running_loop().create_future()
    reference.set_exception(error)

    def remote(*arguments: Any) -> Any:
        if not is_sent and not isinstance(error, RayTaskError):
            raise error
        return reference

    rank = _RayRank(
        SimpleNamespace(call=SimpleNamespace(remote=remote)), 0, _SharedProgress(1.0), 1.0
    )
    with pytest.raises(expected, match=message):
        await rank.call("train_minibatches", "a batch")
    assert reference.exception() is error


NUM_LOOKS = 3000


async def asks_until_it_fails(ask: Callable[[], Awaitable[Any]]) -> None:
    """Ask until Ray has noticed a death: a killed actor may answer once more, and an object of it
    may still be there.
    """
    for _ in range(NUM_LOOKS):
        await ask()
        await asyncio.sleep(0.1)


@pytest.mark.engine
async def test_a_batch_that_ray_loses_ends_the_life_of_the_ranks() -> None:
    with ray_cluster(RaySection(), [Bundle(cpus=1.0)], debug=False):
        holder = ray.remote(num_cpus=0)(Holder).remote()
        rank = _RayRank(ray.remote(num_cpus=0)(Answering).remote(), 0, _SharedProgress(60.0), 60.0)
        (held,) = await holder.held.remote()
        # What tells a start that moves on from one that hangs.
        actors, nodes = await asyncio.to_thread(stages)
        assert [state for _, state, node, pid in actors if node in nodes and pid].count("ALIVE") > 0
        ray.kill(holder)
        # The object goes with the process that owns it, which this waits for.
        with pytest.raises(RayActorError):
            await asks_until_it_fails(holder.held.remote)
        with pytest.raises(RankDiedError, match="connection to trainer rank 0 was lost: OwnerDied"):
            await asks_until_it_fails(
                lambda: rank.answer(rank.actor.call.remote("logprobs", [held]))
            )
        assert (await rank.call("logprobs", None)).shape == (4,)
