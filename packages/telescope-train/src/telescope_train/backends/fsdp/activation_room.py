"""The memory of a rank for activations, measured once when everything else is in memory."""

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from telescope_train.backends.fsdp.sharding import gather_values
from telescope_train.config.trainer_section import TrainerSection
from telescope_train.models.adaptive_checkpointing import GIB, AdaptiveCheckpointing

LEFT_SHARE = 0.1
"""Share of a GPU's memory that is left free, because blocks of memory leave gaps."""
LOGITS_BYTES = 2**28
"""Size of two blocks of float32 logits on a GPU, which `logprobs` limits to this."""
CPU_SHARE = 0.5
"""Share of a machine's free memory that its ranks use; servers and environments grow too."""

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux shows a container its limits."""


class ActivationRoom(NamedTuple):
    """The memory that is left for activations, and a reason for people."""

    num_bytes: float
    reason: str


def limit_activations(
    checkpointing: AdaptiveCheckpointing, trainer: TrainerSection, device: torch.device
) -> str:
    """Limit the memory for backward passes to the room of the rank that has least.

    Returns a sentence that says how much that is, and why. Every rank calls this, when weights,
    gradients and moments have been in memory at the same time.
    """
    every = gather_values(_room(trainer, device))
    least = min(every)
    checkpointing.limit(least.num_bytes)
    return (
        "as few layers are recomputed as memory needs: a row may keep "
        f"{max(0.0, least.num_bytes) / GIB:.2f} GiB ({least.reason})"
    )


def _room(trainer: TrainerSection, device: torch.device) -> ActivationRoom:
    if trainer.activation_memory_gib is not None:
        return ActivationRoom(trainer.activation_memory_gib * GIB, "activation_memory_gib")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = free + torch.cuda.memory_reserved(device)
        used = torch.cuda.max_memory_allocated(device)
        left = own - used - LOGITS_BYTES - LEFT_SHARE * total
        return ActivationRoom(
            left, f"what weights, gradients and moments leave of {own / GIB:.1f} GiB"
        )
    free = _free_bytes()
    # As if all ranks were on this machine, because those of others do not say how many they are.
    num_ranks = torch.distributed.get_world_size()
    share = CPU_SHARE * free / num_ranks
    return ActivationRoom(
        share, f"half of {free / GIB:.1f} GiB of free memory, divided by {num_ranks}"
    )


def _free_bytes() -> int:
    """Return the free memory of this machine, or of the container if that is less."""
    free = psutil.virtual_memory().available
    try:
        allowed = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if allowed == "max" else max(0, min(free, int(allowed) - used))
