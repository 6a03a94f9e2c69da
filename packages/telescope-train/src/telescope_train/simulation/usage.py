"""The load of a simulated run over time: its servers, its ranks, and its queues.

Readings come at equal intervals of virtual time. When there are many, neighbors are made one and
the interval doubles, so that a long run has as many as a short one.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from telescope_train.simulation.engine import SimulatedEngine
from telescope_train.simulation.trainer import SimulatedRanks

_FIRST_INTERVAL_S = 1.0
_MOST_READINGS = 240
"""Most readings; an even number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The load in one part of a simulated run."""

    from_s: float
    to_s: float
    servers_busy: float
    """Share of the servers' time in which they had work, 0 to 1."""
    ranks_busy: float
    """Share of the time in which the ranks computed, 0 to 1."""
    rollouts_waiting: float
    """Rollouts and calls that waited for a slot, or to begin."""
    requests_waiting: float
    """Requests in the queues of the servers."""
    groups_ready: float
    """Groups that were ready and not trained on yet."""


class Queues(NamedTuple):
    """Lengths of the queues at one moment."""

    rollouts_waiting: float
    requests_waiting: float
    groups_ready: float


class _Reading(NamedTuple):
    time_s: float
    servers_s: float
    """Seconds in which servers had work so far, summed over all."""
    ranks_s: float
    queues: Queues
    """Means since the previous reading."""


class UsageMeter:
    """Reads the load of a run repeatedly."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        ranks: SimulatedRanks,
        sampler_queues: Callable[[], dict[str, int]],
    ) -> None:
        self._engines = engines
        self._ranks = ranks
        self._sampler_queues = sampler_queues
        self._interval_s = _FIRST_INTERVAL_S
        self._readings = [_Reading(0.0, 0.0, 0.0, Queues(0.0, 0.0, 0.0))]

    async def run(self) -> None:
        """Read until canceled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.read()

    def read(self) -> None:
        """Record the load up to now, and the queues."""
        queues = self._sampler_queues()
        self._readings.append(
            _Reading(
                time_s=asyncio.get_running_loop().time(),
                servers_s=sum(engine.busy_until_now_s for engine in self._engines),
                ranks_s=self._ranks.busy_until_now_s,
                queues=Queues(
                    rollouts_waiting=queues["rollouts_waiting"],
                    requests_waiting=sum(engine.num_waiting for engine in self._engines),
                    groups_ready=queues["groups_ready"],
                ),
            )
        )
        if len(self._readings) > _MOST_READINGS:
            self._merge()

    def usage(self) -> tuple[Usage, ...]:
        """Return the readings, in order."""
        return tuple(
            Usage(
                from_s=before.time_s,
                to_s=after.time_s,
                servers_busy=(after.servers_s - before.servers_s)
                / ((after.time_s - before.time_s) * len(self._engines)),
                ranks_busy=(after.ranks_s - before.ranks_s) / (after.time_s - before.time_s),
                **after.queues._asdict(),
            )
            for before, after in pairwise(self._readings)
            if after.time_s > before.time_s
        )

    def _merge(self) -> None:
        """Merge pairs of readings, and read half as often from now on."""
        first, *rest = self._readings
        self._readings = [
            first,
            *(
                later._replace(
                    queues=Queues(
                        *((a + b) / 2 for a, b in zip(one.queues, later.queues, strict=True))
                    )
                )
                for one, later in zip(rest[::2], rest[1::2], strict=True)
            ),
        ]
        self._interval_s *= 2
