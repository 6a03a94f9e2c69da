"""The settings of `[ray]`: the cluster, and where on it the processes of a run go."""

from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from telescope_train.config.fields import Index, Positive, Section

Strategy: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Nodes for processes of a kind: few, many, one for all, or a separate one for each."""


class RaySection(Section):
    """The cluster on which the processes are placed."""

    ray_address: str | None = None
    """Address of a running Ray cluster; null = start one of the run's own on this machine, whatever
    other clusters are there."""
    ray_runtime_env: dict[str, JsonValue] = Field(default_factory=dict)
    """Ray's runtime environment of all processes, such as `{ env_vars = { HF_HOME = "/data" } }`:
    processes on other nodes do not have the variables of this one."""
    ray_inference_placement_strategy: Strategy = "PACK"
    """Nodes of the servers: `PACK` = few, `SPREAD` = many, `STRICT_PACK` = one for all,
    `STRICT_SPREAD` = a separate one for each."""
    ray_trainer_placement_strategy: Strategy = "PACK"
    """Nodes of the trainer processes, likewise; ranks are numbered by node and GPU."""
    ray_environment_placement: Literal["driver"] | Strategy = "driver"
    """Place of the environment processes: `driver` = this machine, or nodes of the cluster,
    likewise. Then each node needs the environments installed, and the secrets that they declare in
    the variables of its Ray."""
    ray_placement_timeout_s: Positive = 300.0
    """Seconds in which a cluster that has no room, or does not start a process, may do nothing
    else for the run, at the start and after the loss of a node. A cluster of the run's own never
    gets more room, so nothing is waited for there."""
    worker_progress_timeout_s: Positive = 1800.0
    """Seconds without any progress after which a trainer process counts as dead. A call may take
    any time as long as batches, weights or files make progress."""
    max_trainer_restarts: Index = 3
    """Consecutive restarts of trainer processes that died, from the newest checkpoint, before the
    run ends; a completed step resets the count. 0 = the run ends at once."""
    ray_inference_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each inference server; without a GPU, also its number of threads."""
    ray_trainer_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each trainer process; without a GPU, also its number of threads."""
    ray_environment_cpus_per_worker: Positive = 1.0
    """CPUs reserved for each environment process that is placed on the nodes of the cluster."""
