"""Many small tensors as few large transfers: each transfer costs two processes a meeting.

Sender and receiver form the same buckets, because both go by the sizes of the tensors alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")
BUCKET_BYTES = 64 * 1024 * 1024
"""A bucket is closed before it would grow beyond this; a larger tensor has one of its own."""
_ALIGNMENT = 64
"""Bytes; whatever the dtype, a tensor may begin there."""


def in_buckets(
    items: Iterable[Item], num_bytes: Callable[[Item], int], *, limit_bytes: int = BUCKET_BYTES
) -> Iterator[list[Item]]:
    """Group `items` in their order; takes one bucket's items at a time."""
    bucket: list[Item] = []
    total = 0
    for item in items:
        size = _aligned(num_bytes(item))
        if bucket and total + size > limit_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size
    if bucket:
        yield bucket


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a uint8 vector that holds the contents of all `tensors`."""
    flat = torch.empty(sum(_aligned(one.nbytes) for one in tensors), dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        flat[offset : offset + tensor.nbytes] = content
        offset += _aligned(tensor.nbytes)
    return flat


def empty(sizes: Sequence[int]) -> torch.Tensor:
    """Return room for the contents of tensors of these sizes, in bytes."""
    return torch.empty(sum(_aligned(size) for size in sizes), dtype=torch.uint8)


def unflattened(
    flat: torch.Tensor, forms: Sequence[tuple[torch.dtype, Sequence[int]]]
) -> list[torch.Tensor]:
    """Return the tensors of these dtypes and shapes that `flattened` made `flat` of, as views."""
    tensors: list[torch.Tensor] = []
    offset = 0
    for dtype, shape in forms:
        size = size_bytes(dtype, shape)
        tensors.append(flat[offset : offset + size].view(dtype).view(torch.Size(shape)))
        offset += _aligned(size)
    return tensors


def size_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor, in bytes."""
    return dtype.itemsize * torch.Size(shape).numel()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
