"""Many small tensors as few large transfers, because processes wait for each other in each.

Sender and receivers form the same buckets, because both use only the sizes of the tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")
BUCKET_BYTES = 64 * 1024 * 1024
"""A bucket is closed before it would grow beyond this; a larger tensor gets its own bucket."""
_ALIGNMENT = 64
"""Bytes; tensors start at multiples of this, where a view of any dtype may begin."""


def in_buckets(
    items: Iterable[Item], num_bytes: Callable[[Item], int], *, limit_bytes: int = BUCKET_BYTES
) -> Iterator[list[Item]]:
    """Yield `items` in their order, grouped; reads only one bucket and one item ahead."""
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
    """Return [bytes] uint8 with the contents of all `tensors`, each at an aligned offset."""
    flat = torch.empty(sum(_aligned(one.nbytes) for one in tensors), dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        flat[offset : offset + tensor.nbytes] = content
        offset += _aligned(tensor.nbytes)
    return flat


def empty(sizes: Sequence[int]) -> torch.Tensor:
    """Return [bytes] uint8 with room for tensors of these `sizes` in bytes."""
    return torch.empty(sum(_aligned(size) for size in sizes), dtype=torch.uint8)


def unflattened(
    flat: torch.Tensor, forms: Sequence[tuple[torch.dtype, Sequence[int]]]
) -> list[torch.Tensor]:
    """Return the tensors that `flattened` put into `flat`, as views of these dtypes and shapes."""
    parts = parts_of(flat, [size_bytes(*form) for form in forms])
    return [
        part.view(dtype).view(torch.Size(shape))
        for part, (dtype, shape) in zip(parts, forms, strict=True)
    ]


def parts_of(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the bytes of each tensor that `flattened` put into `flat`, given their sizes."""
    parts: list[torch.Tensor] = []
    offset = 0
    for size in sizes:
        parts.append(flat[offset : offset + size])
        offset += _aligned(size)
    return parts


def size_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return dtype.itemsize * torch.Size(shape).numel()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
