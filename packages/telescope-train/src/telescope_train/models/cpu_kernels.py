"""Faster forwards of modules, and a faster product, where results are equal."""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_FEW = 64
"""Number of outputs of a Linear that replaces one without memory."""


@torch.no_grad()
def replace_forward(
    module: Any, forward: Callable[[Any, Tensor], Tensor], *, rtol: float, atol: float
) -> bool:
    """Give `module` this `forward(module, x)` if both agree on two rows; returns whether it did.

    The rows are not multiples of one another and have as many columns as the module's weight. A
    kernel that is missing or refuses them counts as not equal. A module without memory is judged by
    another one like it.
    """
    judged = _with_memory(module) if module.weight.is_meta else module
    is_equal = _agree(judged, partial(forward, judged), rtol=rtol, atol=atol)
    if is_equal:
        module.forward = partial(forward, module)
    return is_equal


def _with_memory(module: Any) -> Any:
    """Return a module of the same kind with new values; a Linear gets only a few outputs."""
    if type(module) is torch.nn.Linear:
        has_bias, num_outputs = module.bias is not None, min(module.out_features, _FEW)
        made: Any = torch.nn.Linear(
            module.in_features, num_outputs, has_bias, device="cpu", dtype=module.weight.dtype
        )
    else:
        made = copy.deepcopy(module).to_empty(device="cpu")
    for parameter in made.parameters():
        values = torch.linspace(-2.0, 3.0, parameter.numel(), dtype=parameter.dtype)
        parameter.copy_(values.reshape(parameter.shape).sin())
    return made


def _agree(module: Any, forward: Callable[[Tensor], Tensor], *, rtol: float, atol: float) -> bool:
    width, dtype = module.weight.shape[-1], module.weight.dtype
    values = torch.linspace(-3.0, 2.0, 2 * width, dtype=dtype).reshape(2, width).cos()
    expected = module(values)
    try:
        return torch.allclose(forward(values), expected, rtol=rtol, atol=atol)
    except (AttributeError, RuntimeError):
        return False


def replace_rms_norms(model: torch.nn.Module) -> int:
    """Give every RMSNorm of `model` that computes x / rms(x) * weight a faster forward.

    Returns how many. Parameters, names and results stay as they were.
    """
    replaced = 0
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            continue
        forward = partial(_rms_norm, epsilon)
        replaced += replace_forward(module, forward, rtol=1e-5, atol=1e-6)
    return replaced


def _rms_norm(epsilon: float, module: Any, values: Tensor) -> Tensor:
    return _CpuRmsNorm.apply(values, module.weight, epsilon)


class _CpuRmsNorm(torch.autograd.Function):
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
        """Gradients: of x, s * (g w - n * mean(g w n)); of w, the sum of g n over all rows."""
        normed, weight, scale = ctx.saved_tensors
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight).div_(weight.shape[-1]).unsqueeze(-1)
        grad_values = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_values, grad_weight, None


def replace_linears(model: torch.nn.Module) -> int:
    """Give every plain float32 Linear of `model` a faster forward; returns how many.

    Parameters and names stay as they were, results up to rounding.
    """
    replaced = 0
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32:
            replaced += replace_forward(module, _linear, rtol=1e-4, atol=1e-5)
    return replaced


def is_onednn_faster() -> bool:
    """Return whether MKL leaves half of each core unused on this machine: AMD with AVX-512."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _is_made_by_amd(Path("/proc/cpuinfo"))
    )


def _is_made_by_amd(cpuinfo: Path) -> bool:
    """Return whether Linux names AMD as the vendor; False on other systems."""
    try:
        with cpuinfo.open() as lines:
            return any(
                line.split(":")[-1].strip() == "AuthenticAMD"
                for line in lines
                if line.startswith("vendor_id")
            )
    except OSError:
        return False


@cache
def has_onednn_product() -> bool:
    """Return whether oneDNN is faster here, and computes float32 products correctly."""
    left = torch.linspace(-3.0, 2.0, 15, dtype=torch.float32).cos().reshape(3, 5)
    right = torch.linspace(-2.0, 3.0, 20, dtype=torch.float32).sin().reshape(4, 5)
    try:
        return is_onednn_faster() and torch.allclose(_product(left, right), left @ right.T)
    except (AttributeError, RuntimeError):
        return False


def product(left_XK: Tensor, right_NK: Tensor) -> Tensor:
    """Return left @ right.T by the faster library for their device and dtype.

    Neither needs to be contiguous. Both have the same dtype.
    """
    is_plain = left_XK.device.type == "cpu" and left_XK.dtype == torch.float32
    if is_plain and left_XK.numel() and right_NK.numel() and has_onednn_product():
        return _product(left_XK, right_NK)
    return left_XK @ right_NK.T


def _linear(module: torch.nn.Linear, values: Tensor) -> Tensor:
    if values.dim() < 2 or not values.numel():  # oneDNN takes rows, and at least one
        return F.linear(values, module.weight, module.bias)
    return _OnednnLinear.apply(values, module.weight, module.bias)


def _product(left_XK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias; neither needs to be contiguous."""
    return torch.ops.mkldnn._linear_pointwise(left_XK, right_NK, bias_N, "none", [], "")


class _OnednnLinear(torch.autograd.Function):
    """y = x @ w.T + b."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(values, weight)
        return _product(values, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients: of x, g @ w; of w, g.T @ x over all rows; of b, the sum of g."""
        values, weight = ctx.saved_tensors
        for_values, for_weight, for_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _product(grad, weight.T) if for_values else None,
            _product(rows.T, values.flatten(0, -2).T) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )
