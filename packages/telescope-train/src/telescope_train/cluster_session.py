"""The cluster of a run before its processes start: resources of nodes, logs and places.

    look_at_nodes -> places of environment workers -> room of servers and ranks, checked

On a cluster of the run's own there is one node, this machine, and nothing to look at.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from telescope_core.base.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_train.checkpoints.folders import checkpoints_folder
from telescope_train.cluster.environment_workers import RayLauncher
from telescope_train.cluster.logs_home import LogsHome, logs_home
from telescope_train.cluster.network import Network
from telescope_train.cluster.nodes import ask_nodes, living_nodes
from telescope_train.cluster.placement import Rooms, place_environments, place_processes
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.wire import server_secret
from telescope_train.plan.node_checks import Seen, Wanted, look_here, markers, node_problems
from telescope_train.plan.prepared import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSession:
    """The cluster that a run has joined, or its own."""

    network: Network
    logs: LogsHome
    """Fetches the logs of nodes that do not share the run folder."""
    secret: str = field(repr=False)
    """Secret of this start of the run, required by its servers and its receiver of traces."""
    wanted: Wanted | None = None
    """The checks of each node; None = none, on our own cluster."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Ray's id of a node -> its name in messages."""
    seen: Mapping[str, Seen] = field(default_factory=dict[str, Seen])
    """Name of a node -> its resources."""

    def traces_at(self, config: TrainConfig) -> str:
        """Return the address of this machine at which servers reach the receiver of traces."""
        return config.inference.gateway_host or self.network.address()

    async def find_room(self, prepared: Prepared) -> Rooms:
        """Return the reserved resources of servers and ranks.

        Raises ConfigError if there is no room, or if a chosen node lacks something.
        """
        rooms = await asyncio.to_thread(place_processes, prepared.config, prepared.device)
        if self.wanted is None:
            return rooms
        problems = node_problems(
            self.seen,
            self.wanted,
            servers={self.labels.get(node, node) for node in rooms.servers.nodes()},
            ranks={self.labels.get(node, node) for node in rooms.ranks.nodes()},
            device=prepared.device,
        )
        if told := list(problems):
            raise ConfigError("\n".join(told))
        return rooms


@asynccontextmanager
async def open_nodes(prepared: Prepared, folder: RunFolder) -> AsyncIterator[ClusterSession]:
    """Examine the nodes, and start environments' workers on the nodes where they belong.

    The logs of nodes far away are complete when the context ends.
    """
    session = await _look_at_nodes(prepared, folder)
    await _place_environments(prepared, session.network)
    try:
        yield session
    finally:
        await session.logs.finish()


async def _look_at_nodes(prepared: Prepared, folder: RunFolder) -> ClusterSession:
    config, secret = prepared.config, server_secret(os.environ)
    if config.ray.ray_address is None:
        return ClusterSession(
            network=Network(is_local=True), logs=LogsHome.of_none(), secret=secret
        )
    network = Network(is_local=False, driver=Network(is_local=False).address())
    # Environments here reach the gateway at that address too.
    os.environ.update(network.reached_directly(os.environ))
    models = config.model.model, config.algorithm.reference_model
    with markers(folder.path, checkpoints_folder(config), *models) as wanted:
        nodes = await asyncio.to_thread(living_nodes)
        seen = await ask_nodes(nodes, look_here, wanted)
    apart = [node for node, one in seen.items() if not one.shares_run]
    return ClusterSession(
        network=network,
        logs=logs_home(folder.logs_path.absolute(), apart),
        secret=secret,
        wanted=wanted,
        labels={node.id: node.label for node in nodes},
        seen={node.label: one for node, one in seen.items()},
    )


async def _place_environments(prepared: Prepared, network: Network) -> None:
    """Reserve resources for the workers on nodes, and set the launcher of their places."""
    places = prepared.environments.on_cluster
    if places is None or not places.num_places:
        return
    room = await asyncio.to_thread(place_environments, prepared.config, places.num_places)
    places.launcher = RayLauncher(room.places(), network, prepared.environments.secrets)
