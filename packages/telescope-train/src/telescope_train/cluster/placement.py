"""Where the processes of a run go: what each one needs, and its place on the cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from telescope_core.errors import ConfigError
from telescope_train.config.schema import TrainConfig

_SHARE = 0.5
"""Of a GPU that two processes share, as Ray counts: it shows the whole GPU to both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one process needs."""

    cpus: float
    """CPUs that Ray reserves; they need not be whole."""
    gpus: int = 0
    """Whole GPUs."""


class Places(NamedTuple):
    """Ray's options for the actors of a run: one entry for each process."""

    servers: list[dict[str, Any]]
    ranks: list[dict[str, Any]]


def bundles_of(config: TrainConfig, device: str) -> list[Bundle]:
    """Return what each process needs: servers first, then trainer ranks; one if they share."""
    if config.inference.colocate:
        return [shared_bundle(config)]
    ray, gpus = config.ray, 1 if device == "cuda" else 0
    server = Bundle(cpus=ray.ray_inference_cpus_per_worker, gpus=gpus)
    rank = Bundle(cpus=ray.ray_trainer_cpus_per_worker, gpus=gpus)
    return [
        *[server] * config.inference.inference_num_workers,
        *[rank] * config.trainer.trainer_num_workers,
    ]


def place_processes(config: TrainConfig, device: str) -> Places:
    """Reserve room for all processes at once; raises ConfigError if the cluster has too little."""
    bundles = bundles_of(config, device)
    room = reserve(bundles, deadline_s=config.ray.ray_placement_timeout_s)
    if config.inference.colocate:
        return shared_places(config, room)
    places = [placed(room, index, bundle) for index, bundle in enumerate(bundles)]
    num_servers = config.inference.inference_num_workers
    return Places(places[:num_servers], places[num_servers:])


def shared_bundle(config: TrainConfig) -> Bundle:
    """Return what a server and a rank need together."""
    ray = config.ray
    return Bundle(cpus=ray.ray_inference_cpus_per_worker + ray.ray_trainer_cpus_per_worker, gpus=1)


def shared_places(config: TrainConfig, room: PlacementGroup) -> Places:
    """Return the places of a server and a rank in the one bundle of `room`."""

    def half(cpus: float) -> list[dict[str, Any]]:
        return [placed(room, 0, Bundle(cpus=cpus)) | {"num_gpus": _SHARE}]

    return Places(
        half(config.ray.ray_inference_cpus_per_worker), half(config.ray.ray_trainer_cpus_per_worker)
    )


def reserve(bundles: Sequence[Bundle], *, deadline_s: float) -> PlacementGroup:
    """Reserve room for all `bundles` at once.

    Raises ConfigError if the cluster has no room within `deadline_s` seconds.
    """
    # All or nothing: actors that are placed one by one could fill the cluster before the last of
    # them has room, and the run would wait for it without an error.
    group = placement_group(
        [
            {"CPU": bundle.cpus, "GPU": bundle.gpus} if bundle.gpus else {"CPU": bundle.cpus}
            for bundle in bundles
        ],
        strategy="PACK",
    )
    try:
        ray.get(group.ready(), timeout=deadline_s)
    except GetTimeoutError:
        cpus = sum(bundle.cpus for bundle in bundles)
        gpus = sum(bundle.gpus for bundle in bundles)
        raise ConfigError(
            f"the Ray cluster had no room for {len(bundles)} processes ({cpus:g} CPUs, {gpus} "
            f"GPUs) within {deadline_s:g} s; it has {ray.cluster_resources()}. Add nodes, lower "
            "trainer_num_workers or inference_num_workers, or raise ray_placement_timeout_s"
        ) from None
    return group


def placed(group: PlacementGroup, index: int, bundle: Bundle) -> dict[str, Any]:
    """Return the actor options that put an actor into bundle `index`."""
    return {
        "num_cpus": bundle.cpus,
        "num_gpus": bundle.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }
