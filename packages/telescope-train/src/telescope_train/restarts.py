"""Restarts of a run: when trainer ranks die, its steps continue from the newest checkpoint.

    run_with_restarts
      |    take_steps(begun)    sampler and loop, from a checkpoint to the last step
      |        | RankDiedError
      `--- go_back(died)        new ranks; ranks, servers and records are as they were at the newest
                                whole checkpoint, which is returned

Both functions are the caller's. This module decides how often they are called before the run ends.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from telescope_core.records.restarts import Restart
from telescope_train.backends.protocol import RankDiedError
from telescope_train.checkpoints.folders import RunCheckpoint

Begun = TypeVar("Begun")
"""Checkpoint at which the steps begin, or begin again."""


class Restarts:
    """Counts consecutive restarts without progress of the run."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reached = -1
        self._in_a_row = 0

    def count(self, died: RankDiedError, reached: int) -> None:
        """Count another restart; raises RankDiedError if it is one too many.

        `reached`: steps that were done when the rank died.
        """
        if reached > self._reached:
            self._reached, self._in_a_row = reached, 0
        if self._in_a_row < self._most:
            self._in_a_row += 1
        elif self._most:
            raise RankDiedError(
                f"{died}. The trainer ranks were started again {self._most} times in a row without "
                f"getting beyond step {self._reached}, so the run ends; resume it once the cause "
                "is mended, or raise max_trainer_restarts"
            )
        else:
            raise died


def restart_at(
    begun: RunCheckpoint | None, died: RankDiedError, reached: int, *, time_s: float
) -> Restart:
    """Return the record of going back to `begun` at `time_s`; `reached`: number of steps taken."""
    return Restart(
        time_s=time_s,
        reason=str(died),
        reached=reached,
        step=0 if begun is None else begun.step,
        checkpoint="" if begun is None else str(begun.path),
    )


async def run_with_restarts(
    begun: Begun,
    take_steps: Callable[[Begun], Awaitable[None]],
    *,
    go_back: Callable[[RankDiedError], Awaitable[Begun]],
    died: Callable[[RankDiedError], None],
) -> None:
    """Take the steps after `begun`; each time ranks die, go back and continue.

    `died` is called with each death, and raises if there were too many. Ranks may die in `go_back`
    as well.
    """
    death: RankDiedError | None = None
    while True:
        try:
            if death is not None:
                begun = await go_back(death)
            await take_steps(begun)
            return
        except RankDiedError as error:
            died(error)
            death = error
