"""Fused kernels for a model on CPU, which vLLM's CPU build contains but does not use.

vLLM computes a normalization with seven torch operations, one after the other. With a tiny model,
starting them takes longer than computing them.
"""

import json

import torch
from torch import Tensor
from vllm import ir
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.platforms import current_platform

_PROVIDER = "telescope_cpu"


def install() -> list[str]:
    """Make the kernels available to every model of this process.

    Returns arguments for vLLM's command line that make it prefer them where they fit.
    """
    # Loads vLLM's compiled library, which defines `torch.ops._C`.
    current_platform.import_kernels()
    # Registered with vLLM rather than patched into models, so that vLLM falls back to its own
    # operation wherever `supports_args` refuses.
    norm, add = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    norm.register_impl(_PROVIDER, supports_args=_fits_norm)(_rms_norm)
    add.register_impl(_PROVIDER, supports_args=_fits_add, inplace=True)(_fused_add_rms_norm)
    CustomOp.register_oot(_decorated_op_cls=_FusedSiluAndMul, name="SiluAndMul")
    preferred = {"rms_norm": [_PROVIDER], "fused_add_rms_norm": [_PROVIDER]}
    return ["--kernel-config", json.dumps({"ir_op_priority": preferred})]


# vLLM compares the signatures of the functions below with those of its operations, by the names
# and the number of the parameters. They therefore list parameters that they do not use.


def _fits_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _fits_add(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _fits_norm(x, weight, epsilon, variance_size)


def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    # Heads that a model splits from a row are a strided view; the kernel gets a packed copy.
    x = x.contiguous()
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    # Writes both results over its inputs, which is why it is registered as `inplace`.
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


class _FusedSiluAndMul(SiluAndMul):
    def forward_cpu(self, x: Tensor) -> Tensor:
        gated = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        torch.ops._C.silu_and_mul(gated, x.contiguous())
        return gated
