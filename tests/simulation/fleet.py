"""Processes of simulated servers: they die and hang as planned, and take a while to start."""

import asyncio
from collections.abc import Callable, Sequence

from telescope_core.base.errors import ProcessDiedError
from telescope_train.inference.servers import Loss, Reached
from telescope_train.simulation.engine import SimulatedEngine


class SimulatedFleet:
    """A fleet of simulated servers; see `inference.supervisor.Fleet`."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        *,
        start_s: float = 40.0,
        progress_s: float = 120.0,
        failed_starts: int = 0,
    ) -> None:
        """`failed_starts`: number of first starts that end with a dead server."""
        self._engines = engines
        self._start_s = start_s
        self._progress_s = progress_s
        self._failed_starts = failed_starts

    async def until_lost(self, index: int, heard_s: Callable[[], float]) -> Loss:
        """Return why a server has died, or that it hangs."""
        # Waiting for an event and not for a clock: a run in which everything waits is over.
        why = await self._engines[index].until_in_trouble()
        if not why:
            await asyncio.sleep(self._progress_s)
        return Loss(why or f"it hangs: it was silent for {self._progress_s:g} s")

    async def start_again(self, index: int) -> Reached:
        """Start a server; returns its address when it is healthy."""
        self._engines[index].die("it is ended")
        await asyncio.sleep(self._start_s)
        if self._failed_starts > 0:
            self._failed_starts -= 1
            raise ProcessDiedError("it died while it started, as planned")
        self._engines[index].start_again()
        return Reached(self._engines[index].name)
