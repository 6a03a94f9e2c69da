"""The seam between a weight transport and whoever publishes weights: what is announced."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a receiver must know before a tensor comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def headers(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorHeader]:
    """Describe `tensors` for the receivers."""
    return [
        TensorHeader(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
        )
        for name, tensor in tensors
    ]
