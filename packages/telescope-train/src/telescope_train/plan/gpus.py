"""Check whether a run fits a machine's GPUs: their number, and the memory of each.

Arithmetic over what `memory` estimates; nothing is started. Imports no torch.
"""

import math
from collections.abc import Iterator, Sequence

from telescope_train.config.fields import decided, was_set
from telescope_train.config.inference_section import STORED
from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import smaller_rank
from telescope_train.models.facts import ModelFacts
from telescope_train.plan.memory import (
    MemoryPlan,
    rank_memory,
    resident_bytes,
    server_memory,
    smallest_cache_bytes,
    transfer_bytes,
)

CONTEXT_BYTES = 2 * 2**30
"""Memory of CUDA, NCCL, kernels and captured graphs in each process: 1 to 2 GiB."""

NCCL_BYTES = 2**30
"""Shared memory that NVIDIA advises for NCCL in a container."""


def num_gpus_needed(config: TrainConfig) -> int:
    """Return the number of GPUs of a run; a server of several counts them all."""
    if config.inference.shares_gpu:
        return 1
    inference = config.inference
    servers = inference.inference_num_workers * inference.processes_per_server
    return servers + config.trainer.trainer_num_workers


def colocated(
    config: TrainConfig, facts: ModelFacts, limit: int, gpus: Sequence[int]
) -> TrainConfig:
    """Return `config` with this machine's choices for a GPU shared by trainer and server.

    The choices are the kind of sharing that `colocate = "auto"` means, and the server's share of
    the memory if the trainer stays on the same GPU. `gpus` and `limit`: see `gpu_problems`.
    """
    inference, scheduling = config.inference, config.scheduling
    if inference.colocate not in ("auto", "resident"):
        return config
    apart = config.model_copy(update={"inference": decided(inference, colocate=False)})
    is_pair = num_gpus_needed(apart) == 2 and config.weights.weight_transport != "nccl"
    if inference.colocate == "auto" and (len(gpus) != 1 or not is_pair):
        return apart
    share = inference.gpu_memory_utilization
    rank = rank_memory(config, facts, device="cuda")
    server = server_memory(config, facts, limit, device="cuda")
    if rank is not None and gpus and gpus[0]:
        left = 1 - (rank.total_bytes + CONTEXT_BYTES) / gpus[0]
        if not was_set(inference, "gpu_memory_utilization"):
            # More than all its requests can fill would be missing to the activations of the rank.
            most = 1.0 if server is None else (server.total_bytes + CONTEXT_BYTES) / gpus[0]
            # In whole percents, as a person would set it; what is too little is told as a problem.
            share = max(0.01, min(share, math.ceil(100 * most) / 100, math.floor(100 * left) / 100))
        fits = share <= left and _least_of_server(config, facts, limit) <= share * gpus[0]
    else:
        fits = False
    if inference.colocate == "resident" or fits:
        section = decided(inference, colocate="resident", gpu_memory_utilization=share)
        return config.model_copy(update={"inference": section})
    turns = decided(inference, colocate=True)
    if not was_set(scheduling, "max_async_rollout"):
        scheduling = decided(scheduling, max_async_rollout=0)
    return config.model_copy(update={"inference": turns, "scheduling": scheduling})


def share_of_rank(config: TrainConfig, gpus: Sequence[int]) -> float:
    """Return the largest share of its GPU that a rank's tensors may take.

    It is 1 unless a server keeps its own share all the time: what the rank took while that server
    is down would be missing when it starts again. `gpus`: see `gpu_problems`.
    """
    if config.inference.colocate != "resident":
        return 1.0
    context = CONTEXT_BYTES / min(gpus) if gpus and all(gpus) else 0.0
    return max(0.01, 1 - config.inference.gpu_memory_utilization - context)


def shared_memory_note(config: TrainConfig, shared_bytes: int | None) -> str | None:
    """Return what to know if NCCL has little shared memory on this machine, whose GPUs it connects.

    `shared_bytes`: size of `/dev/shm`; None = unknown.
    """
    processes = config.trainer.trainer_num_workers, config.inference.processes_per_server
    without = config.weights.weight_transport in ("gloo", *STORED) or config.inference.shares_gpu
    if shared_bytes is None or shared_bytes >= NCCL_BYTES or (processes == (1, 1) and without):
        return None
    return (
        f"/dev/shm has {shared_bytes / 2**20:.0f} MiB, and NCCL, which connects GPUs through it, "
        "does not start where it has too little: give a container 1 GiB or more (--shm-size=16g, "
        "or --ipc=host)"
    )


def gpu_problems(
    config: TrainConfig, facts: ModelFacts, limit: int, gpus: Sequence[int]
) -> Iterator[str]:
    """Yield why the run does not fit `gpus`, and what to change.

    `gpus`: bytes of each that this machine lets the run see, 0 where unknown. `limit`: tokens of
    prompt and answer together.
    """
    yield from _count_problems(config, len(gpus))
    if not gpus or not all(gpus) or facts.num_parameters is None:
        return
    yield from memory_problems(config, facts, limit, min(gpus))


def _count_problems(config: TrainConfig, num_gpus: int) -> Iterator[str]:
    needed = num_gpus_needed(config)
    if needed <= num_gpus:
        return
    servers, ranks = config.inference.inference_num_workers, config.trainer.trainer_num_workers
    advice = (
        "let both share it with colocate = 'auto'"
        if num_gpus == 1 and (servers, ranks) == (1, 1)
        else "lower trainer_num_workers or inference_num_workers, or set ray_address to a cluster "
        "with more"
    )
    yield (
        f"this run needs {needed} GPUs for {servers} servers (inference_num_workers, "
        f"inference_tensor_parallel_size, inference_data_parallel_size) and {ranks} trainer ranks "
        f"(trainer_num_workers), and this machine has {num_gpus}; {advice}"
    )


def memory_problems(
    config: TrainConfig, facts: ModelFacts, limit: int, gpu_bytes: int
) -> Iterator[str]:
    """Yield why a rank or a server does not fit a GPU of `gpu_bytes`."""
    rank = rank_memory(config, facts, device="cuda")
    server = server_memory(config, facts, limit, device="cuda")
    if rank is None or server is None:
        return
    if rank.total_bytes + CONTEXT_BYTES > gpu_bytes:
        yield (
            f"a trainer rank needs about {_gib(rank.total_bytes + CONTEXT_BYTES)} GiB "
            f"({_largest(rank)}), and a GPU here has {_gib(gpu_bytes)}; {_smaller(config)}"
        )
    used = config.inference.gpu_memory_utilization * gpu_bytes
    least = _least_of_server(config, facts, limit)
    kept = rank.total_bytes + CONTEXT_BYTES
    if config.inference.colocate == "resident" and kept + max(least, used) > gpu_bytes:
        advice = "let them take turns with colocate = true"
        if kept + least <= gpu_bytes:
            advice = f"lower gpu_memory_utilization, or {advice}"
        yield (
            f"a trainer rank of {_gib(kept)} GiB and a server of {_gib(max(least, used))} do not "
            f"fit the GPU's {_gib(gpu_bytes)} together; {advice}"
        )
    elif least > used:
        size = config.inference.inference_tensor_parallel_size
        who = "a server" if size == 1 else f"each of the {size} GPUs of a server"
        # A GPU that trainer and server share is one.
        more = "" if config.inference.shares_gpu else " or inference_tensor_parallel_size"
        yield (
            f"{who} needs at least {_gib(least)} GiB for its weights and one request of "
            f"{limit} tokens, and gpu_memory_utilization = "
            f"{config.inference.gpu_memory_utilization:g} gives it {_gib(used)} of "
            f"{_gib(gpu_bytes)}; raise gpu_memory_utilization{more}, or lower max_model_len"
        )
    if config.inference.colocate is True:
        yield from _colocation_problems(config, facts, rank, least, gpu_bytes)


def _least_of_server(config: TrainConfig, facts: ModelFacts, limit: int) -> float:
    """Return the bytes of a GPU with which a server can answer; infinite if unknown."""
    server = server_memory(config, facts, limit, device="cuda")
    if server is None:
        return math.inf
    weights, cache = dict(server.parts)["weights"], smallest_cache_bytes(config, facts, limit)
    return weights + cache + CONTEXT_BYTES


def _colocation_problems(
    config: TrainConfig, facts: ModelFacts, rank: MemoryPlan, least: float, gpu_bytes: int
) -> Iterator[str]:
    # A server that sleeps keeps its context, and so does a rank that waits. When the server gets
    # new weights it has all of its memory already.
    resident = resident_bytes(config, rank) + CONTEXT_BYTES
    transfer = transfer_bytes(config, facts)
    used = config.inference.gpu_memory_utilization * gpu_bytes
    if rank.total_bytes + 2 * CONTEXT_BYTES > gpu_bytes >= rank.total_bytes + CONTEXT_BYTES:
        yield (
            f"a trainer rank beside a server that sleeps needs about "
            f"{_gib(rank.total_bytes + 2 * CONTEXT_BYTES)} GiB, and the GPU has "
            f"{_gib(gpu_bytes)}; {_smaller(config)}"
        )
    room = gpu_bytes - resident - transfer
    if used <= room:
        return
    kept = f"{_gib(resident)} GiB on the GPU while rollouts are sampled"
    passed = f"an update of weights passes {_gib(transfer)} GiB at once"
    if room >= least:
        share = int(100 * room / gpu_bytes) / 100
        yield (
            f"the trainer keeps {kept}, and {passed}, so "
            f"that gpu_memory_utilization = {config.inference.gpu_memory_utilization:g} "
            f"({_gib(used)} of {_gib(gpu_bytes)} GiB) does not fit; lower it to {share:g}"
        )
    else:
        yield (
            f"the trainer keeps {kept}, {passed}, and "
            f"the server needs {_gib(least)}: more than the GPU's {_gib(gpu_bytes)} together; "
            f"{_smaller(config)}"
        )


def _smaller(config: TrainConfig) -> str:
    shares_gpu = config.inference.shares_gpu
    return smaller_rank(config.trainer, config.megatron, shares_gpu=shares_gpu)


def _largest(plan: MemoryPlan) -> str:
    shown = sorted(plan.parts, key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {_gib(size)}" for name, size in shown)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
