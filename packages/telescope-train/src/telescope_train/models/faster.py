"""Replacing a module's forward by a faster one, where it proves equal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def replace_forward(
    module: Any, forward: Callable[[Tensor], Tensor], *, rtol: float, atol: float
) -> bool:
    """Give `module` this `forward` if both agree on two rows; returns whether it did.

    The rows are no multiples of one another and have as many columns as the module's weight. A
    kernel that is missing or refuses them is not equal either.
    """
    width, dtype = module.weight.shape[-1], module.weight.dtype
    values = torch.linspace(-3.0, 2.0, 2 * width, dtype=dtype).reshape(2, width).cos()
    expected = module(values)
    try:
        is_equal = torch.allclose(forward(values), expected, rtol=rtol, atol=atol)
    except (AttributeError, RuntimeError):
        return False
    if is_equal:
        module.forward = forward
    return is_equal
