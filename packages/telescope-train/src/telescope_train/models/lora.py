"""LoRA adapters by peft: add them, turn them off, and merge them into the weights.

Paper: arXiv:2106.09685. An adapted matrix is W + (alpha / rank) B A with W frozen. peft renames
`x.weight` to `x.base_layer.weight`. Exports are merged and have the base names. Dims: T
tokens, R rank, I inputs, O outputs of a matrix.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from telescope_train.config.trainer_section import TrainerSection
from telescope_train.models.fit import require_peft, require_targets
from telescope_train.models.rounding import round_steadily

ADAPTER = "default"
"""peft's name for an adapter without one."""


def add_adapters(lm: PreTrainedModel, trainer: TrainerSection, *, model_name: str) -> None:
    """Freeze `lm` and add float32 adapters to the matrices in `lora_target_modules`.

    `model_name`: the folder or Hub id of `lm`. Of a folder, what is saved names the absolute path,
    because peft looks for it from any working directory.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    require_targets(lm, trainer.lora_target_modules)
    folder = Path(model_name).expanduser()
    config = LoraConfig(
        r=trainer.lora_rank,
        lora_alpha=trainer.lora_alpha,
        lora_dropout=trainer.lora_dropout,
        target_modules=list(trainer.lora_target_modules),
        base_model_name_or_path=str(folder.resolve()) if folder.is_dir() else model_name,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, lm, adapter_name=ADAPTER)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_("lora_" in name)
        # Most optimizer steps are so small that they would round to nothing in bfloat16.
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def first_adapters(lm: PreTrainedModel, *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, its first value, whole on the CPU) of every adapter matrix.

    A is drawn as peft draws it, the same for any number of ranks; B is 0, so that the adapted model
    begins as the model itself.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in adapted_modules(lm).values():
        down, up = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
        first = torch.empty(down.shape, dtype=down.dtype)
        torch.nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator)
        yield down, first
        yield up, torch.zeros(up.shape, dtype=up.dtype)


def adapted_modules(lm: PreTrainedModel) -> dict[str, Any]:
    """Return the adapted modules by their base name; empty without LoRA."""
    return {
        name: module
        for name, module in lm.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Turn the adapters off inside the block."""
    modules = adapted_modules(lm).values()
    for module in modules:
        # peft's own switch also changes requires_grad, which sharding has fixed.
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in modules:
            module._disable_adapters = False


@contextmanager
def dropout_on(lm: PreTrainedModel) -> Iterator[None]:
    """Turn `lora_dropout` on inside the block; elsewhere models are in eval mode."""
    dropouts = [module.lora_dropout for module in adapted_modules(lm).values()]
    for dropout in dropouts:
        dropout.train()
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.eval()


def merged_weights(
    lm: PreTrainedModel, whole: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (base name, value) of every tensor in the model's files, with adapters merged in.

    `whole` gathers one parameter. Sums are rounded once, to `dtype` or that of the parameter.
    Buffers that are in the files (a Gemma 4 layer's scale) are whole on every rank, and keep their
    own dtype: they are no weights, but without them it would be another model.
    """
    modules = adapted_modules(lm)
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            continue
        base_name = name.replace(".base_layer.", ".")
        module_name, _, leaf = base_name.rpartition(".")
        value = whole(parameter.detach())
        if leaf == "weight" and module_name in modules:
            value = merged(value, modules[module_name], whole).to(dtype or value.dtype)
        yield base_name, value
    for name, value in lm.named_buffers():
        module_name, _, leaf = name.rpartition(".")
        if leaf not in lm.get_submodule(module_name)._non_persistent_buffers_set:
            yield name.replace(".base_layer.", "."), value


def merged(weight: Tensor, module: Any, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `weight` with the adapter of `module` added, in float32 or wider."""
    down_RI = whole(module.lora_A[ADAPTER].weight.detach())
    up_OR = whole(module.lora_B[ADAPTER].weight.detach())
    return _sum(weight, down_RI, up_OR, module.scaling[ADAPTER])


def _sum(weight: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """Add in float32 or wider, which is the dtype of the result."""
    wide = torch.promote_types(weight.dtype, up_OR.dtype)
    change_OI = (up_OR.to(wide) @ down_RI.to(wide)) * scale
    return weight.to(wide) + change_OI


def adapter_weights(
    lm: PreTrainedModel, whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a peft file, value) of every adapter matrix."""
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            yield peft_name(name), whole(parameter.detach())


def peft_name(name: str) -> str:
    """Return the name in a peft file of the adapter matrix that the model calls `name`."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def write_adapter(folder: Path, lm: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` reads."""
    folder.mkdir(parents=True)
    lm.peft_config[ADAPTER].save_pretrained(str(folder))
    tensors = {name: value.contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def round_sums_once(lm: PreTrainedModel) -> None:
    """Make the adapted modules of `lm` round only once, after adding the adapter.

    peft adds the adapter to the result of the frozen matrix, which is already rounded. In bfloat16
    values below half of its last place are lost, which is most of an adapter for its first tens of
    steps. Here one product takes the inputs and the low-rank values together, and sums in float32
    inside.
    """
    for module in adapted_modules(lm).values():
        module.forward = partial(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    base = module.base_layer
    if module._disable_adapters:
        return base(x)
    down_RI, up_OR = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
    low = linear(module.lora_dropout[ADAPTER](x), down_RI) * module.scaling[ADAPTER]
    product: Tensor = _AdaptedProduct.apply(x, base.weight, low, up_OR)
    return product if base.bias is None else product + base.bias


class _AdaptedProduct(torch.autograd.Function):
    """x W' + low B' with W frozen. Autograd through `cat` would compute the gradient of W too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, low: Tensor, up_OR: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OI, low, up_OR)
        return linear(torch.cat([x, low], dim=-1), torch.cat([weight_OI, up_OR], dim=1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        weight_OI, low, up_OR = ctx.saved_tensors
        of_up_OR = gradient.flatten(0, -2).T @ low.flatten(0, -2)
        return gradient @ weight_OI, None, gradient @ up_OR, of_up_OR


def merged_blocks(
    lm: PreTrainedModel, whole: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (base name, value in `dtype`) of adapted matrices and of others in the same block.

    Engines fuse them (query, key and value; gate and up) and cannot load a fused matrix in part.
    `whole` gathers one parameter; `dtype` is what servers compute in. In bfloat16 the sum is
    rounded so that the adapter is in it on average over the matrix: rounded to nearest, almost all
    of it would stay where the frozen weights are, for tens of steps. Without an adapter the result
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
