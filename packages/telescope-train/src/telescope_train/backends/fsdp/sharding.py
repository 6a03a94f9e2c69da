"""Sharding a policy over all ranks with FSDP2, and getting whole values back."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from telescope_core.errors import ConfigError
from telescope_train.models.packed import PackedPolicy


def decoder_layers(lm: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the layers of `lm`; ConfigError for an architecture built differently."""
    layers = getattr(lm.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigError(
            f"{type(lm).__name__} has no list of decoder layers called `layers`; "
            "train_backend fsdp knows Llama, Qwen, Mistral and models built like them"
        )
    return layers


def shard(
    policy: PackedPolicy, device: torch.device, compute_dtype: torch.dtype, *, offload: bool
) -> None:
    """Shard every decoder layer, then what is left (embeddings, norm, head) as the root.

    Gradients are summed over ranks, never averaged. `offload` keeps weights, gradients and
    optimizer state in CPU memory between uses.
    """
    precision = MixedPrecisionPolicy()
    if any(parameter.dtype != compute_dtype for parameter in policy.parameters()):
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    arguments = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for layer in decoder_layers(policy.lm):
        fully_shard(layer, reshard_after_forward=dist.get_world_size() > 1, **arguments)
    fully_shard(policy, **arguments)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(policy: torch.nn.Module) -> None:
    """Leave only the shards: after a forward without backward some parameters are still whole.

    A whole parameter is a copy, in the dtype of the layers: what is written to it is lost, and
    what is read from it is rounded.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Gather `value` on `device`, where the ranks communicate; every rank receives it there."""
    if not isinstance(value, DTensor):
        return value.to(device)
    local = value.to_local()
    if local.device.type != device.type:
        value = DTensor.from_local(
            local.to(device),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value.full_tensor()


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, sharing memory with it."""
    return value.to_local() if isinstance(value, DTensor) else value


def gather_values(value: object) -> list:
    """Return the plain value of every rank, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
