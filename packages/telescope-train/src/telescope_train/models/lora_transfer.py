"""The tensors for servers of a model that is trained with LoRA: merged matrices, or the adapter.

An update of an adapter is far smaller than the spacing of bfloat16 numbers around the weights that
it is added to. Rounded to nearest, almost all of the sum would stay where the frozen weights are,
for tens of steps.
Dims: R rank, I inputs, O outputs of a matrix.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from telescope_train.models.lora import ADAPTER, adapted_modules, merged, peft_name
from telescope_train.models.rounding import round_steadily


def merged_blocks(
    lm: PreTrainedModel, whole: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (base name, value in `dtype`) of adapted matrices and of others in the same block.

    Engines fuse them (query, key and value; gate and up) and cannot load a fused matrix in part.
    `whole` gathers one parameter; `dtype` is what servers compute in. In bfloat16 the sum is
    rounded so that the adapter is in it on average over the matrix; without an adapter the result
    is the frozen matrix.
    """
    modules = adapted_modules(lm)
    blocks = {name.rpartition(".")[0] for name in modules}
    for name, parameter in lm.named_parameters():
        base_name = name.replace(".base_layer.", ".")
        module_name, _, leaf = base_name.rpartition(".")
        if ".lora_" in name or not _is_matrix_of(lm, module_name, blocks):
            continue
        # As the layers of the trainer read it, and as the servers loaded it.
        value = whole(parameter.detach()).to(dtype)
        if leaf == "weight" and module_name in modules:
            value_OI = merged(value, modules[module_name], whole)
            is_narrow = dtype == torch.bfloat16
            value = round_steadily(value_OI, base_name) if is_narrow else value_OI.to(dtype)
        yield base_name, value


def _is_matrix_of(lm: PreTrainedModel, module_name: str, blocks: set[str]) -> bool:
    if module_name.rpartition(".")[0] not in blocks:
        return False
    module = lm.get_submodule(module_name)
    return isinstance(getattr(module, "base_layer", module), torch.nn.Linear)


def scaled_adapter(
    lm: PreTrainedModel, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every adapter matrix as (name in a peft file, value); (alpha / rank) is part of B."""
    scales = {name: module.scaling[ADAPTER] for name, module in adapted_modules(lm).items()}
    for name, parameter in lm.named_parameters():
        module_name, separator, matrix = name.partition(".lora_")
        if not separator:
            continue
        value = whole(parameter.detach())
        # In float32: a server that scaled its own copy would round once more.
        scaled = value * scales[module_name] if matrix.startswith("B") else value
        yield peft_name(name), scaled
