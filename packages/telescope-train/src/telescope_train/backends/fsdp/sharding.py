"""Shard a policy over all ranks with FSDP2, and gather whole values again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from transformers import PreTrainedModel

from telescope_core.base.errors import ConfigError
from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.models.group_wait import wait_as_all
from telescope_train.models.packed import PackedPolicy
from telescope_train.observability.spans import SpanRecorder


def decoder_layers(lm: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the layers of `lm`; ConfigError for an architecture built differently."""
    layers = getattr(lm.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ConfigError(
            f"{type(lm).__name__} has no list of decoder layers called `layers`; "
            "train_backend fsdp knows Llama, Qwen, Mistral and models built like them"
        )
    return layers


def weight_mesh(layout: RankLayout, device: torch.device) -> DeviceMesh:
    """Return the ranks of one copy of the model, or [copy, rank in it] if there are several."""
    # With one copy the mesh has one dimension: torch would otherwise reduce twice.
    sizes, names = (layout.weight_shards,), ("shard",)
    if layout.num_copies > 1:
        sizes, names = (layout.num_copies, *sizes), ("replicate", *names)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        wait_as_all(group)
    return mesh


def shard(
    policy: PackedPolicy, mesh: DeviceMesh, compute_dtype: torch.dtype, *, offload: bool
) -> None:
    """Shard every decoder layer, then the rest (embeddings, norm, head) as the root, over `mesh`.

    Gradients are summed over ranks, never averaged. `offload` keeps weights, gradients and
    optimizer state in CPU memory between uses.
    """
    # Gradients of float32 weights are reduced in float32, because a sum over ranks in bfloat16
    # would lose small ones. Those of bfloat16 weights are added up in bfloat16, over batches too.
    precision = MixedPrecisionPolicy()
    if any(parameter.dtype != compute_dtype for parameter in policy.parameters()):
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    arguments = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    # Layers come first, because the root takes the parameters that no module inside it has sharded.
    # Layers are whole only while they run. FSDP keeps its root whole until backward is over, with
    # the embeddings and the head, which may be tied. A single rank keeps its layers too: resharding
    # would cost it another copy of each in backward.
    for layer in decoder_layers(policy.lm):
        fully_shard(
            layer,
            reshard_after_forward=mesh.shape[-1] > 1,
            mp_policy=precision,
            **arguments,
        )
    # The root is given a row: its tokens, and the temperatures that its log-probs are divided by.
    # FSDP would round the temperatures like activations, 0.7 to 0.69921875.
    fully_shard(policy, mp_policy=replace(precision, cast_forward_inputs=False), **arguments)
    register_fsdp_forward_method(policy, "head_difference")
    # FSDP divides by the number of ranks unless it is given a factor. It applies a factor with the
    # reduction PREMUL_SUM, which gloo does not have, unless plain sums are forced.
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def time_reductions(policy: PackedPolicy, spans: SpanRecorder) -> None:
    """Record each reduction of gradients over ranks as a span."""
    if dist.get_world_size() == 1:
        return  # nothing is summed
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_TimedReduction(spans))


class _TimedReduction:
    """FSDP's own reduction, timed; it runs in its own stream, beside the backward pass."""

    def __init__(self, spans: SpanRecorder) -> None:
        self._spans = spans

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._spans.span("gradient reduction"):
            return dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )


def reshard(policy: torch.nn.Module) -> None:
    """Free whole parameters, some of which remain after a forward pass without backward.

    A whole parameter is a copy in the dtype of the layers. Writes to it are lost, and values read
    from it are rounded.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `value` whole on `device`, which communicates; every rank must call it."""
    if not isinstance(value, DTensor):
        return value.to(device)
    # An offloaded shard is on the CPU, where NCCL cannot gather it. from_local is told shape and
    # stride, because it would otherwise assume that all shards are as large as this one.
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


def without_content(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `whole(value)` without content, which needs no memory."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `value`, which shares memory with it."""
    return value.to_local() if isinstance(value, DTensor) else value


class ShardPlace(NamedTuple):
    """The shard of a parameter that this rank has."""

    number: int
    """Which one, from 0; the same on the ranks of other copies that have it."""
    num_shards: int
    """Number of shards of a copy."""


def shard_place(value: torch.Tensor) -> ShardPlace:
    """Return the place of this rank's shard of `value`; a whole tensor is one shard."""
    if not isinstance(value, DTensor):
        return ShardPlace(0, 1)
    dimension = next(i for i, one in enumerate(value.placements) if isinstance(one, Shard))
    mesh = value.device_mesh
    return ShardPlace(mesh.get_local_rank(dimension), mesh.shape[dimension])


def gather_values(value: object) -> list:
    """Return the plain value of every rank, in rank order."""
    if dist.get_world_size() == 1:
        return [value]  # without pickling it
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
