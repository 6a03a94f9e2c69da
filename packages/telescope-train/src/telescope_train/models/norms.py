"""RMS normalisation on the CPU in a third of the passes over memory that eager code takes.

A 0.6M-parameter model spends a fifth of its step in norms; there is no compiler to fuse them on
a fresh machine. Only modules that prove equal are replaced.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from telescope_train.models.faster import replace_forward


def replace_rms_norms(model: torch.nn.Module) -> int:
    """Give every RMSNorm of `model` that computes x / rms(x) * weight a faster forward.

    Returns how many. Parameters, names and results stay as they were.
    """
    replaced = 0
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            continue
        forward = partial(_forward, module, epsilon)
        replaced += replace_forward(module, forward, rtol=1e-5, atol=1e-6)
    return replaced


def _forward(module: Any, epsilon: float, values: Tensor) -> Tensor:
    return _RmsNorm.apply(values, module.weight, epsilon)


class _RmsNorm(torch.autograd.Function):
    """y = n * w with n = x * s and s = 1 / sqrt(mean(x^2) + epsilon)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()
        scale = scale.div_(values.shape[-1]).add_(epsilon).rsqrt_()
        normed = values * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """For x: s * (g w - n * mean(g w n)). For w: the sum of g n over all rows."""
        normed, weight, scale = ctx.saved_tensors
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight).div_(weight.shape[-1]).unsqueeze(-1)
        grad_values = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_values, grad_weight, None
