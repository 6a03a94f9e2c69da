"""Convert weights between Hugging Face files and the parts of a rank, tensor by tensor.

No rank ever has more of the whole model than one tensor beside its own part.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from telescope_train.backends.megatron.architecture import Architecture
from telescope_train.backends.megatron.mapping import (
    WeightPart,
    join,
    parts_of,
    shard,
    take_apart,
    unshard,
    whole_shape,
)
from telescope_train.models.weight_files import WeightFiles

_IN_ANOTHER_MODULE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine's name of a norm, which it merges with the next matrix -> its own name."""
_SHARED_HEAD = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


def canonical_name(name: str) -> str:
    """Return the name of a parameter in Telescope's own layers."""
    for joined, own in _IN_ANOTHER_MODULE.items():
        if name.endswith(joined):
            return name.removesuffix(joined) + own
    return name


class RankWeights:
    """The weights of one rank's part of a model, by their names in the whole model."""

    def __init__(self, model: Any, architecture: Architecture) -> None:
        from megatron.core import parallel_state as groups

        self._architecture = architecture
        self._parts = parts_of(architecture)
        self._tensor = groups.get_tensor_model_parallel_group()
        self._pipeline = groups.get_pipeline_model_parallel_group()
        self._experts = groups.get_expert_model_parallel_group()
        self.model = model
        self.parameters: dict[str, Any] = dict(_named(model))
        """Name in the whole model -> parameter of this rank."""
        self._mark_divided()

    def _mark_divided(self) -> None:
        """Mark divided parameters for the gradient norm; others count on one rank alone.

        The library marks them only while it fills them with random numbers.
        """
        for part in self._parts:
            if part.split is not None:
                for name in (part.name, _SHARED_HEAD if part.name == _EMBEDDING else part.name):
                    if name in self.parameters:
                        self.parameters[name].tensor_model_parallel = True

    def load(self, files: WeightFiles) -> None:
        """Fill every parameter from the files of the Hugging Face model."""
        rank, size = self._tensor.rank(), self._tensor.size()
        for part in self._parts:
            targets = self._targets(part)
            if not targets:
                continue
            whole = join(part, [files.read(name) for name in part.sources], self._architecture)
            mine = shard(part, whole, rank, size)
            for target in targets:
                with torch.no_grad():
                    target.copy_(mine)

    def _targets(self, part: WeightPart) -> list[Tensor]:
        """Return the tensors of this rank that hold `part`: usually one or none."""
        names = [part.name]
        if part.name == _EMBEDDING and self._architecture.is_tied:
            # The last pipeline stage has a copy of its own for the head.
            names.append(_SHARED_HEAD)
        held = [self._held(name, part.expert, self.parameters) for name in names]
        return [value for value in held if value is not None]

    def _held(self, name: str, expert: int | None, values: dict[str, Any]) -> Tensor | None:
        if expert is None:
            return values.get(name)
        each = (self._architecture.num_experts or 0) // self._experts.size()
        if expert // each != self._experts.rank():
            return None
        local = expert % each
        if name in values:
            return values[name][local]
        # Transformer Engine has a tensor for each expert.
        return values.get(f"{name.replace('.fc', '.linear_fc')}.weight{local}")

    def export(self, values: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) on every rank, in the order of a forward pass.

        `values`: what to export in place of the parameters, by their names; every rank of the
        group calls this and exhausts it.
        """
        values = self.parameters if values is None else values
        for part in self._parts:
            whole = self._whole(part, values)
            yield from zip(part.sources, take_apart(part, whole, self._architecture), strict=True)

    @torch.no_grad()
    def _whole(self, part: WeightPart, values: dict[str, Tensor]) -> Tensor:
        any_value = next(iter(values.values()))
        held = self._held(part.name, part.expert, values)
        whole = any_value.new_empty(whole_shape(part, self._architecture))
        if held is not None:
            held = held.detach()
            if part.split is None or self._tensor.size() == 1:
                whole.copy_(held)
            else:
                shards = [torch.empty_like(held) for _ in range(self._tensor.size())]
                dist.all_gather(shards, held.contiguous(), group=self._tensor)
                whole.copy_(unshard(part, shards))
        stages, experts = self._pipeline.size(), self._experts.size()
        if part.expert is not None and experts > 1 and self._is_mine(part):
            each = (self._architecture.num_experts or 0) // experts
            _broadcast(whole, part.expert // each, self._experts)
        if stages > 1:
            _broadcast(whole, self._stage_of(part), self._pipeline)
        return whole

    def _stage_of(self, part: WeightPart) -> int:
        if part.layer is None:
            return 0 if part.name == _EMBEDDING else self._pipeline.size() - 1
        return part.layer // (self._architecture.num_layers // self._pipeline.size())

    def _is_mine(self, part: WeightPart) -> bool:
        return self._stage_of(part) == self._pipeline.rank()


def _broadcast(value: Tensor, owner: int, group: dist.ProcessGroup) -> None:
    dist.broadcast(value, src=dist.get_global_rank(group, owner), group=group)


def _named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a rank, named with layer numbers of the whole model."""
    layers = model.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0
    for name, parameter in model.named_parameters():
        in_whole = re.sub(
            r"layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + first}.", name
        )
        yield canonical_name(in_whole), parameter
