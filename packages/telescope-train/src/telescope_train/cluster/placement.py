"""Places for the processes of a run on the cluster, according to their needs.

Servers and trainer ranks have a placement group each, so that each kind follows its own strategy.
All processes of a server are one bundle, which Ray never divides over nodes.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from telescope_core.base.errors import ConfigError
from telescope_train.cluster.nodes import living_nodes, nodes_text
from telescope_train.config.schema import Strategy, TrainConfig

OWN_CLUSTER_S = 30.0
"""Longest wait for room in a cluster of the run's own, which gets no further nodes: in this time
Ray says that it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """CPUs and GPUs for one process, or for one server with all of its processes."""

    cpus: float
    """CPUs that Ray reserves; they need not be whole."""
    gpus: float = 0
    """Whole GPUs, or half of one that two processes share: Ray shows it to both."""

    def resources(self) -> dict[str, float]:
        """Return the bundle as resources of Ray."""
        return {"CPU": self.cpus, "GPU": self.gpus} if self.gpus else {"CPU": self.cpus}


class RoomRequest(NamedTuple):
    """A request for the resources of several processes of one kind."""

    what: str
    """Name of the processes, for messages."""
    settings: str
    """Names of the settings that determine their needs."""
    bundles: Sequence[Bundle]
    strategy: Strategy

    def shortage(self) -> str:
        """Return a sentence with the requested resources."""
        cpus = sum(bundle.cpus for bundle in self.bundles)
        gpus = sum(bundle.gpus for bundle in self.bundles)
        where = {
            "STRICT_PACK": ", all on one node",
            "STRICT_SPREAD": ", each on a node of its own",
        }.get(self.strategy, "")
        return f"{len(self.bundles)} {self.what} ({cpus:g} CPUs, {gpus} GPUs{where})"


class Room(NamedTuple):
    """Resources that Ray has reserved, for actors that are started there."""

    group: PlacementGroup
    bundles: Sequence[Bundle]

    def places(self) -> list[dict[str, Any]]:
        """Return the options of one actor for each bundle; those of a node are adjacent."""
        return [
            {
                "num_cpus": self.bundles[index].cpus,
                "num_gpus": self.bundles[index].gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self.group, placement_group_bundle_index=index
                ),
            }
            for index in in_order_of_nodes(self.nodes())
        ]

    def nodes(self) -> list[str]:
        """Return the id of each bundle's node; empty if it has none now."""
        table = placement_group_table(self.group)
        by_bundle: Mapping[int, str] = table["bundles_to_node_id"]
        return [by_bundle.get(index) or "" for index in range(len(self.bundles))]

    def give_back(self) -> None:
        """Release the resources."""
        try:
            remove_placement_group(self.group)
        except RayError:
            return  # the cluster is gone, and with it what it had reserved


class RankRoom:
    """The resources of the trainer ranks, which all move if one of their nodes is lost."""

    def __init__(self, room: Room, reserve_again: Callable[[], Room]) -> None:
        self._room = room
        self._reserve_again = reserve_again

    def places(self) -> list[dict[str, Any]]:
        """Return Ray's options for the actor of each rank; neighbors are on the same node."""
        return self._room.places()

    def nodes(self) -> list[str]:
        """Return the ids of its nodes."""
        return self._room.nodes()

    async def renew(self) -> None:
        """Reserve other resources if a node is lost; raises ConfigError if there are none."""
        living = {node.id for node in await asyncio.to_thread(living_nodes)}
        if not living.issuperset(self._room.nodes()):
            # Ray would find room for the lost bundles alone, and separate the ranks.
            self._room.give_back()
            self._room = await asyncio.to_thread(self._reserve_again)


class Rooms(NamedTuple):
    """All reserved resources of a run."""

    servers: Room
    ranks: RankRoom


def server_bundles(config: TrainConfig, device: str) -> list[Bundle]:
    """Return the bundle of each server."""
    gpus = config.inference.processes_per_server if device == "cuda" else 0
    gpus *= _share(config)
    bundle = Bundle(cpus=config.ray.ray_inference_cpus_per_worker, gpus=gpus)
    return [bundle] * config.inference.inference_num_workers


def rank_bundles(config: TrainConfig, device: str) -> list[Bundle]:
    """Return the bundle of each trainer rank."""
    gpus = _share(config) if device == "cuda" else 0
    bundle = Bundle(cpus=config.ray.ray_trainer_cpus_per_worker, gpus=gpus)
    return [bundle] * config.trainer.trainer_num_workers


def _share(config: TrainConfig) -> float:
    """Return the part of each GPU that a process gets."""
    return 0.5 if config.inference.shares_gpu else 1


def bundles_of(config: TrainConfig, device: str) -> list[Bundle]:
    """Return the bundles of all processes that Ray places."""
    return [*server_bundles(config, device), *rank_bundles(config, device)]


def place_processes(config: TrainConfig, device: str) -> Rooms:
    """Reserve resources for all processes; raises ConfigError if the cluster has too few."""
    # Ranks first: they need each other's neighborhood more than servers do.
    deadline_s = _deadline_s(config)
    reserve_ranks = partial(reserve, _asked_ranks(config, device), deadline_s=deadline_s)
    ranks = reserve_ranks()
    try:
        servers = reserve(_asked_servers(config, device), deadline_s=deadline_s)
    except BaseException:
        ranks.give_back()
        raise
    return Rooms(servers, RankRoom(ranks, reserve_ranks))


def _asked_ranks(config: TrainConfig, device: str) -> RoomRequest:
    return RoomRequest(
        "trainer ranks",
        "trainer_num_workers, ray_trainer_cpus_per_worker",
        rank_bundles(config, device),
        config.ray.ray_trainer_placement_strategy,
    )


def place_environments(config: TrainConfig, num_workers: int) -> Room:
    """Reserve resources for environment processes; ConfigError if the cluster has too few."""
    strategy = config.ray.ray_environment_placement
    assert strategy != "driver", "those are started without Ray"
    bundle = Bundle(cpus=config.ray.ray_environment_cpus_per_worker)
    request = RoomRequest(
        "environment processes",
        "env_workers, ray_environment_cpus_per_worker",
        [bundle] * num_workers,
        strategy,
    )
    return reserve(request, deadline_s=_deadline_s(config))


def _asked_servers(config: TrainConfig, device: str) -> RoomRequest:
    return RoomRequest(
        "inference servers",
        "inference_num_workers, ray_inference_cpus_per_worker",
        server_bundles(config, device),
        config.ray.ray_inference_placement_strategy,
    )


def _deadline_s(config: TrainConfig) -> float:
    limit_s = config.ray.ray_placement_timeout_s
    return limit_s if config.ray.ray_address is not None else min(limit_s, OWN_CLUSTER_S)


def reserve(request: RoomRequest, *, deadline_s: float) -> Room:
    """Reserve all resources of `request` at once.

    Raises ConfigError if the cluster has no room `deadline_s` seconds after a node joined or left.
    """
    # All or nothing: actors that are placed one by one could fill the cluster before the last of
    # them has room, and the run would wait for it without an error.
    group = placement_group(
        [bundle.resources() for bundle in request.bundles], strategy=request.strategy
    )
    room = Room(group, request.bundles)
    try:
        has_room = _has_room_in_time(group, deadline_s)
    except BaseException:
        room.give_back()
        raise
    if not has_room:
        room.give_back()
        if not living_nodes():
            raise ConfigError(
                "no node of the Ray cluster is alive: Ray's own processes (raylet, gcs_server) "
                "have died; look into the kernel log (out of memory?), and start the run again"
            )
        raise ConfigError(
            f"the Ray cluster had no room for {request.shortage()} within {deadline_s:g} s. It has "
            f"{nodes_text()}. Add nodes, lower the number of processes or what each of them "
            f"reserves ({request.settings}), choose another placement strategy, or raise "
            "ray_placement_timeout_s"
        )
    return room


def _has_room_in_time(group: PlacementGroup, deadline_s: float) -> bool:
    """Wait for room while nodes come and go, because a cluster may grow one node at a time."""
    known: set[str] | None = None
    while (nodes := {node.id for node in living_nodes()}) != known:
        known = nodes
        if group.wait(timeout_seconds=deadline_s):
            return True
    return False


def in_order_of_nodes(node_of_bundle: Sequence[str]) -> list[int]:
    """Return the indices of bundles in an order in which those of a node are adjacent.

    Nodes come in the order of their first bundle, and bundles of a node in their own.
    """
    first = {node: index for index, node in reversed(list(enumerate(node_of_bundle)))}
    return sorted(
        range(len(node_of_bundle)), key=lambda index: (first[node_of_bundle[index]], index)
    )
