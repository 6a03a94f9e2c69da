"""When ranks count as dead: none of them moves on. One that waits for a slow one is not."""

import asyncio
from typing import Any

from telescope_train.backends.protocol import RankDiedError
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.trainer.ranks import _RayRank, _SharedProgress

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
