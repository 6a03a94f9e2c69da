"""Places of environment workers on the nodes of the cluster, before Ray runs.

Environments are opened before anything is started, and their workers start with the first request.
This module connects the two: places that learn later who starts their workers. Needs no Ray.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from telescope_core.base.errors import EnvironmentProcessError
from telescope_core.processes import ProcessSettings
from telescope_core.processes.launch import Lifeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """A worker to be started on some node."""

    number: int
    """Number among all workers of the run."""
    environment: str
    """Its environment, as named in the settings."""
    index: int
    """Index among the workers of its environment."""
    label: str
    """Its name in messages."""
    processes: ProcessSettings


class Launcher(Protocol):
    """Starts workers on nodes; see `environment_workers.RayLauncher`."""

    async def launch(
        self, order: WorkerOrder, protocol: asyncio.Protocol, *, silence_s: float
    ) -> Lifeline:
        """Start a worker and connect `protocol` to it.

        Raises EnvironmentProcessError where another attempt may succeed, also after `silence_s`
        seconds in which nothing moves on.
        """
        ...


class EnvironmentPlaces:
    """All places of a run. Give them a launcher before the first request."""

    def __init__(self) -> None:
        self.num_places = 0
        self.launcher: Launcher | None = None

    def of(self, environment: str, processes: ProcessSettings) -> "Sequence[ClusterPlace]":
        """Return new places for the workers of an environment."""
        first = self.num_places
        self.num_places += processes.num_workers
        return [
            ClusterPlace(
                order=WorkerOrder(
                    number=first + index,
                    environment=environment,
                    index=index,
                    label=f"environment process {index} of {environment}",
                    processes=processes,
                ),
                places=self,
            )
            for index in range(processes.num_workers)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlace:
    """A worker process on a node of the cluster; each start may be on another one."""

    order: WorkerOrder
    places: EnvironmentPlaces
    token: str = ""
    gets_secrets: bool = False
    """False: the node has the secrets, because the connection is not encrypted."""

    @property
    def label(self) -> str:
        """Name of the worker in messages."""
        return self.order.label

    async def start(self, protocol: asyncio.Protocol, *, silence_s: float) -> Lifeline:
        """Start a worker and connect `protocol` to it."""
        if self.places.launcher is None:
            raise EnvironmentProcessError(f"{self.label} was asked before the cluster was joined")
        return await self.places.launcher.launch(self.order, protocol, silence_s=silence_s)
