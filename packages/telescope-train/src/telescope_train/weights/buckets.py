"""Combine many small tensors into few large transfers, because each makes processes wait.

Sender and receivers plan the same buckets, because both plan from the headers alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from telescope_train.backends.transfer import TensorHeader
from telescope_train.weights.digests import Digests

_ALIGNMENT = 64
"""Alignment in bytes of tensors in a bucket, so that a view of any dtype may begin there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that are sent together, one after another."""

    number: int
    """Index among all buckets of the transfer."""
    headers: tuple[TensorHeader, ...]
    num_bytes: int
    """Size of all tensors, including gaps between them."""


def plan_buckets(headers: Sequence[TensorHeader], limit_bytes: int) -> list[Bucket]:
    """Return the buckets of a transfer, in the order of `headers`.

    A bucket is closed before it would grow beyond `limit_bytes`; a larger tensor gets its own, as
    every tensor does with 0.
    """
    buckets: list[Bucket] = []
    held: list[TensorHeader] = []
    total = 0

    def close() -> None:
        if held:
            buckets.append(Bucket(number=len(buckets), headers=tuple(held), num_bytes=total))

    for header in headers:
        size = _aligned(header.num_bytes)
        if held and total + size > limit_bytes:
            close()
            held, total = [], 0
        held.append(header)
        total += size
    close()
    return buckets


def filled(
    buckets: Sequence[Bucket],
    tensors: Iterable[tuple[str, torch.Tensor]],
    buffer: Callable[[int], torch.Tensor],
    digests: Digests,
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """Yield each bucket with its content, [bytes] uint8, in memory from `buffer`.

    Holds one bucket and one tensor at a time. Raises ValueError if `tensors` are not those that the
    buckets were planned for: the receivers would cut the stream at other places.
    """
    given = iter(tensors)
    for bucket in buckets:
        flat = buffer(bucket.num_bytes)
        for header, part in zip(bucket.headers, parts_of(flat, bucket), strict=True):
            name, tensor = next(given, ("nothing", torch.empty(0)))
            found = TensorHeader.from_tensor(name, tensor)
            if found != header:
                raise ValueError(
                    f"expected {_described(header)} to be sent next, got {_described(found)}; the "
                    "headers of a backend must say what its weights are, in their order"
                )
            part.copy_(_content(tensor))
            digests.add(name, part)
            del tensor
        yield bucket, flat
        del flat
    extra = next(given, None)
    if extra is not None:
        raise ValueError(
            f"expected no further tensor, got {_described(TensorHeader.from_tensor(*extra))}; the "
            "headers of a backend must name all of its weights"
        )


def emptied(
    bucket: Bucket, flat: torch.Tensor, digests: Digests
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket, as views of `flat`."""
    for header, part in zip(bucket.headers, parts_of(flat, bucket), strict=True):
        # Before the loaders get it: what they do with a buffer is theirs.
        digests.add(header.name, part)
        yield header.name, part.view(header.torch_dtype).view(header.shape)


def parts_of(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """Return the bytes of each tensor of a bucket, as views of `flat`."""
    parts: list[torch.Tensor] = []
    offset = 0
    for header in bucket.headers:
        parts.append(flat[offset : offset + header.num_bytes])
        offset += _aligned(header.num_bytes)
    return parts


def _content(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _described(header: TensorHeader) -> str:
    return f"{header.name} ({header.dtype}, {list(header.shape)})"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
