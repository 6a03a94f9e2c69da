"""The machines of a run with their meters: this one directly, the others through Ray.

Machines join a cluster, leave it and come back, so Ray is asked repeatedly which there are.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from telescope_train.cluster.nodes import on_node
from telescope_train.observability.meters import MeteredNode
from telescope_train.observability.system import NodeMeters, Reading

LIST_EVERY_S = 10.0
"""Seconds between two requests to Ray for the list of machines."""


class RayNode(MeteredNode, Protocol):
    """A machine of the cluster with a reader of its meters."""

    @property
    def is_gone(self) -> bool:
        """Whether the reader there has ended."""
        ...


class ClusterNodes:
    """The present machines; call it before each reading."""

    def __init__(
        self,
        list_nodes: Callable[[], Sequence[Mapping[str, Any]]],
        open_node: Callable[[str, str], RayNode],
        *,
        list_every_s: float = LIST_EVERY_S,
    ) -> None:
        """`list_nodes` returns the rows of `ray.nodes()`; it may be slow.

        `open_node` is given the name of a machine and its id, and returns the way to its meters.
        """
        self._list_nodes = list_nodes
        self._open_node = open_node
        self._list_every_s = list_every_s
        self._listed_s: float | None = None
        self._known: dict[str, RayNode] = {}
        """By id, which is new for a machine that comes back."""

    async def __call__(self) -> Sequence[MeteredNode]:
        """Return every machine of the cluster, or the last known ones if Ray does not answer."""
        now_s = asyncio.get_running_loop().time()
        if self._listed_s is None or now_s - self._listed_s >= self._list_every_s:
            self._listed_s = now_s
            # Ray's library raises a RuntimeError too where its head does not answer: others notice
            # that, and say what it means for the run.
            with suppress(RayError, RuntimeError, OSError):
                self._take(await asyncio.to_thread(self._list_nodes))
        return list(self._known.values())

    def _take(self, listed: Sequence[Mapping[str, Any]]) -> None:
        alive = {node["NodeID"]: node["NodeManagerHostname"] for node in listed if node["Alive"]}
        kept = {
            node_id: node
            for node_id, node in self._known.items()
            if node_id in alive and not node.is_gone
        }
        names = {node.name for node in kept.values()}
        for node_id, host in alive.items():
            if node_id not in kept:
                # Two containers may say the same name.
                name = host if host not in names else f"{host} {node_id[:6]}"
                names.add(name)
                kept[node_id] = self._open_node(name, node_id)
        self._known = kept


def metered_nodes(folder: Path) -> ClusterNodes:
    """Return the machines of the cluster; `folder` is the run's on this machine."""
    here = ray.get_runtime_context().get_node_id()

    def open_node(name: str, node_id: str) -> RayNode:
        return _ThisNode(name, folder) if node_id == here else _OtherNode(name, node_id)

    return ClusterNodes(ray.nodes, open_node)


class _ThisNode:
    """The driver's machine, read in a thread."""

    is_gone = False

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._meters = NodeMeters(folder)

    async def read(self) -> Sequence[Reading]:
        """Return the readings of its meters."""
        return await asyncio.to_thread(self._meters.read)


class _OtherNode:
    """Another machine, read by an actor that reserves no processor."""

    def __init__(self, name: str, node_id: str) -> None:
        self.name = name
        self.is_gone = False
        actor: Any = ray.remote(NodeMeters)
        self._actor = actor.options(**on_node(node_id)).remote()

    async def read(self) -> Sequence[Reading]:
        """Return the readings of its meters; none if the machine or its reader has gone."""
        try:
            return await self._actor.read.remote()
        except RayError:
            self.is_gone = True
            return []
