"""The interface of weight transports, from trainer rank 0 to the workers of servers.

A transport moves buckets of bytes. Their content and order, and the proof that they arrived
unchanged, are the same for all transports and are defined here. An entry point of the group
`telescope.weight_transports` names an instance of `WeightTransport`.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import Protocol

import torch

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_train.backends.transfer import Place, TensorHeader
from telescope_train.config.inference_section import TRANSPORTS_GROUP
from telescope_train.weights.buckets import Bucket, emptied, filled, plan_buckets
from telescope_train.weights.digests import Digests

JOIN_DEADLINE_S = 60.0
"""Longest time in seconds for which members of a group wait for each other."""
TRANSFER_DEADLINE_S = 120.0
"""Longest wait for the other side in a transfer, in seconds.

Shorter than `worker.UNWATCHED_WAIT_S`, for which the other trainer ranks wait for rank 0, so
rank 0 reports a lost server before the others take it for dead.
"""


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
        yield from emptied(bucket, receiver.receive(bucket), digests)
    receiver.settle()
