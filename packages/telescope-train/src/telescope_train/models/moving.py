"""Move numbers: arrays from the host to the device of a model, and tokens of a row to others."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

_PART = 2**25
"""Numbers of a gradient that are widened at a time: 128 MiB of float32."""


def to_device(
    values: NDArray, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return `values` as a tensor on `device`; the copy to a GPU is not awaited.

    A copy from pinned memory runs while the GPU computes earlier work. A plain copy would wait
    until all of that is done.
    """
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def take_shared(values: Tensor, dim: int, places: Tensor) -> Tensor:
    """Return `values.index_select(dim, places)` where many `places` may be the same.

    Gradients of one place are added up in float32 and rounded once. In bfloat16 a sum stands still
    as soon as it is a few hundred times as large as what is added.
    """
    if torch.finfo(values.dtype).bits > 16:
        return values.index_select(dim, places)
    return _Taken.apply(values, dim, places)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, places: Tensor) -> Tensor:
        ctx.shape, ctx.dim = values.shape, dim
        ctx.save_for_backward(places)
        return values.index_select(dim, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        summed = grad.new_zeros(ctx.shape, dtype=torch.float32)
        # In parts, because all of it in float32 would be the largest tensor of the layer.
        num_places = max(1, _PART * len(places) // max(1, grad.numel()))
        parts = zip(places.split(num_places), grad.split(num_places, ctx.dim), strict=True)
        for some, gradient in parts:
            summed.index_add_(ctx.dim, some, gradient.float())
        return summed.to(grad.dtype), None, None
