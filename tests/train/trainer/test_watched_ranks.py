"""When ranks count as dead: none of them moves on. One that waits for a slow one is not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import (
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from telescope_core.errors import ConfigError, NoRoomError
from telescope_train.backends.protocol import RankDiedError
from telescope_train.cluster.placement import Bundle
from telescope_train.cluster.ray_cluster import ray_cluster
from telescope_train.config.schema import RaySection
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.trainer.ray_ranks import _RayRank, _SharedProgress

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


async def silent_after_s(*actors: Any) -> tuple[float, str]:
    """Wait for an answer that never comes; returns when that ended, and how."""
    loop = asyncio.get_running_loop()
    progress = _SharedProgress(TIMEOUT_S)
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


def in_the_actor(cause: Exception) -> RayTaskError:
    """What fails in the process of a rank, as it arrives."""
    return RayTaskError("call", f"Traceback\n{cause}", cause)


LOST = ObjectLostError("ab" * 14, "", "")
FULL = ObjectStoreFullError("no room for 2 GB")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (LOST, RankDiedError, "connection to trainer rank 0 was lost: ObjectLostError: Failed to"),
        (OwnerDiedError("ab" * 14, "", ""), RankDiedError, "was lost: OwnerDiedError"),
        (RaySystemError("the raylet is gone"), RankDiedError, "was lost: RaySystemError"),
        (in_the_actor(LOST), RankDiedError, "was lost: ObjectLostError"),
        (FULL, NoRoomError, "Ray has no room for a batch or an answer of trainer rank 0: no room"),
        (OutOfDiskError("the disk is full"), NoRoomError, "free space in .* with --resume"),
        (in_the_actor(FULL), NoRoomError, "Ray has no room"),
        (in_the_actor(ConfigError("lower it")), ConfigError, "^lower it$"),
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


class Answering:
    """Answers with an object that is in another process, and lost when that dies."""

    def call(self, name: str, held: Any) -> Any:
        return np.zeros(4) if held is None else ray.get(held[0])[:4]


NUM_LOOKS = 600


class Holder:
    """Owns what it gives away."""

    def held(self) -> list[Any]:
        return [ray.put(np.ones(2**20))]


async def asks_until_it_fails(rank: _RayRank, held: Any) -> None:
    """Ask for an object until Ray has noticed that its owner died; until then it may be there."""
    for _ in range(NUM_LOOKS):
        await rank.answer(rank.actor.call.remote("logprobs", [held]))
        await asyncio.sleep(0.1)


@pytest.mark.engine
async def test_a_batch_that_ray_loses_ends_the_life_of_the_ranks() -> None:
    with ray_cluster(RaySection(), [Bundle(cpus=1.0)], debug=False):
        holder = ray.remote(num_cpus=0)(Holder).remote()
        rank = _RayRank(ray.remote(num_cpus=0)(Answering).remote(), 0, _SharedProgress(60.0), 60.0)
        (held,) = await holder.held.remote()
        ray.kill(holder)
        # The object goes with the process that owns it, which this waits for.
        with pytest.raises(RayActorError):
            await holder.held.remote()
        with pytest.raises(RankDiedError, match="connection to trainer rank 0 was lost: OwnerDied"):
            await asks_until_it_fails(rank, held)
        assert (await rank.call("logprobs", None)).shape == (4,)
