"""Where the processes of a run go: what each one needs, and its place on the cluster."""

from typing import Any, NamedTuple

from telescope_train.cluster.ray_cluster import Bundle, placed, reserve
from telescope_train.config.schema import TrainConfig


class Places(NamedTuple):
    """Ray's options for the actors of a run: one entry for each process."""

    servers: list[dict[str, Any]]
    ranks: list[dict[str, Any]]


def bundles_of(config: TrainConfig, device: str) -> list[Bundle]:
    """Return what each process needs: servers first, then trainer ranks."""
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
    places = [placed(room, index, bundle) for index, bundle in enumerate(bundles)]
    num_servers = config.inference.inference_num_workers
    return Places(places[:num_servers], places[num_servers:])
