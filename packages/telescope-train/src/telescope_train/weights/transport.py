"""The interface of weight transports, from trainer rank 0 to the workers of servers.

A transport moves buckets of bytes. Their content and order, and the proof that they arrived
unchanged, are the same for all transports and are defined here. An entry point of the group
`telescope.weight_transports` names an instance of `WeightTransport`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_train.backends.transfer import Place, TensorHeader
from telescope_train.config.inference_section import TRANSPORTS_GROUP
from telescope_train.weights.digests import Digests

_ALIGNMENT = 64
"""Alignment in bytes of tensors in a bucket, so that a view of any dtype may begin there."""
JOIN_DEADLINE_S = 60.0
"""Longest time in seconds for which members of a group wait for each other."""
TRANSFER_DEADLINE_S = 120.0
"""Longest wait for the other side in a transfer, in seconds.

Shorter than `worker.UNWATCHED_WAIT_S`, for which the other trainer ranks wait for rank 0, so
rank 0 reports a lost server before the others take it for dead.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that are sent together, one after another, as each transfer makes processes wait.

    Sender and receivers plan the same buckets, because both plan from the headers alone.
    """

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
            del tensor, part  # which is a view of the buffer
        yield bucket, flat
        del flat
    extra = next(given, None)
    if extra is not None:
        raise ValueError(
            f"expected no further tensor, got {_described(TensorHeader.from_tensor(*extra))}; the "
            "headers of a backend must name all of its weights"
        )


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


class Sender(Protocol):
    """The end of trainer rank 0."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Return [bytes] uint8 to be filled for `send`; an earlier one may be overwritten."""
        ...

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send one bucket, in the newest `buffer`.

        Raises RuntimeError if a receiver has gone or takes no part.
        """
        ...

    def settle(self) -> None:
        """Return when the whole transfer has arrived; raises RuntimeError like `send`."""
        ...

    def close(self) -> None:
        """Leave. Receivers that wait for it fail soon. Idempotent."""
        ...


class Receiver(Protocol):
    """The end of one worker of a server."""

    def receive(self, bucket: Bucket) -> torch.Tensor:
        """Return [bytes] uint8 that is not overwritten; raises RuntimeError if rank 0 has gone."""
        ...

    def settle(self) -> None:
        """Return when all received data may be read from any stream."""
        ...

    def close(self) -> None:
        """Leave. Idempotent."""
        ...


class WeightTransport(Protocol):
    """Both ends of one way to move weights."""

    is_stored: bool
    """Whether what is sent is whole before a receiver takes part, so that servers sample meanwhile
    and any number of them can receive it at any time after."""

    def sender(
        self, place: Place, *, device: torch.device, listen_fd: int | None, wait_s: float | None
    ) -> Sender:
        """Join as rank 0; returns when all receivers have joined.

        `device`: of the trainer rank. `listen_fd`: a socket that listens at `place.port`, whose
        owner the sender becomes; None = it opens one. `wait_s`: longest wait for a receiver, here
        and in a transfer; None = the deadlines above.
        """
        ...

    def receiver(self, place: Place, *, rank: int, device: torch.device) -> Receiver:
        """Join as member `rank`, from 1; `device`: that of the worker."""
        ...


def load_transport(name: str) -> WeightTransport:
    """Return transport `name`; raises UnknownNameError, or ConfigError if it cannot be loaded."""
    found = entry_points(group=TRANSPORTS_GROUP, name=name)
    if not found:
        known = entry_points(group=TRANSPORTS_GROUP).names
        raise unknown_name("weight_transport", name, known)
    try:
        return next(iter(found)).load()
    except AttributeError as error:
        raise ConfigError(
            f"weight_transport {name!r} is not where its package says ({error}); if you changed "
            "its sources, install the package again (here: make setup)"
        ) from error


def send(
    sender: Sender,
    headers: Sequence[TensorHeader],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int,
) -> Digests:
    """Send all tensors; returns when they are sent, so that they may change."""
    digests = Digests()
    buckets = plan_buckets(headers, bucket_bytes)
    for bucket, flat in filled(buckets, tensors, sender.buffer, digests):
        sender.send(bucket, flat)
        del flat  # before the next bucket is filled
    sender.settle()
    return digests


def receive(
    receiver: Receiver, headers: Sequence[TensorHeader], digests: Digests, *, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) as they arrive, and add each to `digests`; must be exhausted."""
    for bucket in plan_buckets(headers, bucket_bytes):
        # A new buffer for each bucket: the loaders keep views of it until their layer is complete.
        flat = receiver.receive(bucket)
        for header, part in zip(bucket.headers, parts_of(flat, bucket), strict=True):
            # Before the loaders get it: what they do with a buffer is theirs.
            digests.add(header.name, part)
            yield header.name, part.view(header.torch_dtype).view(header.shape)
            del part
        del flat  # before the next one is received
    receiver.settle()
