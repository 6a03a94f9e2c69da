"""The machines of a run, as far as their meters go: this one, and the others over Ray."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from telescope_train.observability.meters import MeteredNode
from telescope_train.observability.system import NodeMeters, Reading


def metered_nodes(folder: Path) -> list[MeteredNode]:
    """Return every machine of the cluster; `folder` is where this one writes."""
    here = ray.get_runtime_context().get_node_id()
    nodes: list[MeteredNode] = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        name = node["NodeManagerHostname"]
        if node["NodeID"] == here:
            nodes.insert(0, _ThisNode(name, folder))
        else:
            nodes.append(_OtherNode(name, node["NodeID"]))
    return nodes


class _ThisNode:
    """The driver's machine, read in a thread."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._meters = NodeMeters(folder)

    async def read(self) -> Sequence[Reading]:
        """Return what its meters show."""
        return await asyncio.to_thread(self._meters.read)


class _OtherNode:
    """Another machine, on which an actor without a processor of its own reads."""

    def __init__(self, name: str, node_id: str) -> None:
        self.name = name
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor: Any = ray.remote(NodeMeters)
        self._actor = actor.options(num_cpus=0, scheduling_strategy=place).remote()

    async def read(self) -> Sequence[Reading]:
        """Return what its meters show; none once the machine is gone."""
        try:
            return await self._actor.read.remote()
        except RayError:
            return []
