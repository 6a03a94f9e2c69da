"""Products with a bfloat16 adapter that are rounded only once, after adding the adapter.

peft adds the adapter to the result of the frozen matrix, which is already rounded. Values below
half of its last place are lost, which is most of an adapter for its first tens of steps. Here one
product takes the inputs and the low-rank values together, and sums in float32 inside. Dims: T
tokens, I inputs, O outputs, R rank.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from telescope_train.models.lora import ADAPTER, adapted_modules


def round_sums_once(lm: PreTrainedModel) -> None:
    """Replace the forward methods of the adapted modules of `lm`."""
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
