"""Rounding to bfloat16 that is right on average, where rounding to nearest loses small changes.

A bfloat16 is the upper half of a float32. Adding a number below one unit of the upper half and
cutting off the lower half rounds up for as many of these numbers as the part cut off is large.
"""

import zlib

import torch
from torch import Tensor


def round_at_random(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return float32 `values` in bfloat16, rounded up or down at random."""
    bits = values.view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    # Noise may carry the bits of a NaN over into those of a number.
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def round_steadily(values: Tensor, name: str) -> Tensor:
    """Return float32 `values` in bfloat16, each with its own rounding threshold drawn by `name`.

    It is right on average over many values, and the same values are always rounded the same way. A
    value that bfloat16 holds stays as it is.
    """
    if values.is_meta:
        return values.to(torch.bfloat16)  # only described: there is nothing to round
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
    return round_at_random(values.contiguous(), generator)
