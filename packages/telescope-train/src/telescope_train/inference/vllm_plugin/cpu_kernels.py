"""Fused kernels for a model on CPU: vLLM's CPU build has them, and computes with torch instead.

A normalization by torch is seven operations, one after the other; with a tiny model, starting
them costs more than what they compute.
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
    """Offer the kernels to every model of this process.

    Returns the arguments of vLLM's command line that prefer them where they fit.
    """
    current_platform.import_kernels()
    norm, add = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    norm.register_impl(_PROVIDER, supports_args=_fits_norm)(_rms_norm)
    add.register_impl(_PROVIDER, supports_args=_fits_add, inplace=True)(_fused_add_rms_norm)
    CustomOp.register_oot(_decorated_op_cls=_FusedSiluAndMul, name="SiluAndMul")
    preferred = {"rms_norm": [_PROVIDER], "fused_add_rms_norm": [_PROVIDER]}
    return ["--kernel-config", json.dumps({"ir_op_priority": preferred})]


# vLLM compares the parameters with those of its operations, by name and number.


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
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


class _FusedSiluAndMul(SiluAndMul):
    def forward_cpu(self, x: Tensor) -> Tensor:
        gated = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        torch.ops._C.silu_and_mul(gated, x.contiguous())
        return gated
