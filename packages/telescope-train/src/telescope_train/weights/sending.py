"""`WeightSending`: the part of one trainer rank in updates. Rank 0 sends, all ranks gather.

Every rank goes through all weights together, even after sending has failed: a rank that stopped
would leave the others waiting in the middle of a gather.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from telescope_train.backends.protocol import TransferError, TransferMemoryError
from telescope_train.backends.trainer_backend import TrainerBackend
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.cluster.ports import HeldPort
from telescope_train.config.inference_section import WeightsSection
from telescope_train.weights.digests import Digests
from telescope_train.weights.transport import (
    Bucket,
    Sender,
    filled,
    load_transport,
    plan_buckets,
    send,
)


@dataclass(slots=True)
class _Staged:
    """All weights of a version, in a place from which they can be sent repeatedly."""

    buckets: list[tuple[Bucket, torch.Tensor]]
    """Buckets in the CPU memory of rank 0; none on other ranks, or if servers read files."""
    digests: Digests


@contextmanager
def _telling_memory() -> Generator[None, None, None]:
    """Raise TransferMemoryError where the GPU of this rank has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise TransferMemoryError.of(f"trainer rank {rank}", error) from error


class WeightSending:
    """Describes the weights of a rank, and sends them if this is rank 0."""

    def __init__(
        self,
        backend: TrainerBackend,
        section: WeightsSection,
        *,
        device: torch.device,
        held_port: HeldPort,
        counted: Callable[
            [Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]
        ] = iter,
        pinned: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.pin_memory,
    ) -> None:
        """`counted` is called with each tensor; `pinned`: copy to page-locked memory."""
        self._backend = backend
        self._device = device
        self._held_port = held_port
        self._counted = counted
        is_pinned = section.weight_broadcast_staging == "pinned" and device.type == "cuda"
        self._pinned = pinned if is_pinned else None
        self._frees_gradients = section.weight_broadcast_free_grad_buffers
        self._wire = Wire()
        self._sender: Sender | None = None
        """Sender; None = this rank does not send, or has no connection."""
        self._staged: _Staged | None = None
        self._sent = Digests()
        self._compared = self._sent

    def headers(self) -> list[TensorHeader]:
        """Return the headers of the tensors, in the order of sending. Nothing is gathered."""
        return list(self._backend.transfer_headers())

    @_telling_memory()
    def stage(self, wire: Wire, *, is_sender: bool) -> None:
        """Gather all weights in CPU memory, or in files for servers; every rank calls it.

        `is_sender`: whether this is rank 0, which keeps them. Until the next call, `send` sends
        these weights.
        """
        self._staged = None  # before there are others: it is as large as the model
        weights = self._weights()
        digests, held = Digests(), []
        try:
            if is_sender and load_transport(wire.transport).is_stored:
                place = Place(wire=wire, host="", port=0, world_size=1)
                digests = self._sent_all(self._open(place, None), wire, weights)
            elif is_sender:
                buckets = plan_buckets(self.headers(), wire.bucket_bytes)
                held = list(filled(buckets, weights, self._host_buffer, digests))
        finally:
            self._exhaust(weights)
        self._staged = _Staged(held, digests)

    @_telling_memory()
    def connect(self, place: Place, wait_s: float | None) -> None:
        """Open this end; returns when all servers have joined, if the transport needs that.

        Raises TransferError if one does not.
        """
        self.leave()
        try:
            self._sender = self._open(place, wait_s)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise TransferError(f"not all inference servers have joined: {error}") from error
        self._wire = place.wire

    def _open(self, place: Place, wait_s: float | None) -> Sender:
        return load_transport(place.wire.transport).sender(
            place,
            device=self._device,
            listen_fd=self._held_port.hand_over(place.port),
            wait_s=wait_s,
        )

    @_telling_memory()
    def send(self) -> str:
        """Send all weights to all servers; returns their digest, or "" on ranks other than 0.

        Raises TransferError if a server did not take part.
        """
        weights = iter(()) if self._staged is not None else self._weights()
        try:
            if self._sender is None:
                return ""
            if self._staged is not None:
                self._sent = self._sent_staged(self._sender, self._staged)
            else:
                self._sent = self._sent_all(self._sender, self._wire, weights)
            return self._sent.whole()
        except RuntimeError as error:
            self.leave()
            if isinstance(error, torch.OutOfMemoryError):
                raise  # no receiver is to blame, and another try would end alike
            raise TransferError(f"the weights could not be sent: {error}") from error
        except BaseException:
            # Without this end, the servers that still wait in the transfer give up at once.
            self.leave()
            raise
        finally:
            self._exhaust(weights)

    def _sent_all(
        self, sender: Sender, wire: Wire, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Digests:
        return send(sender, self.headers(), weights, bucket_bytes=wire.bucket_bytes)

    @staticmethod
    def _sent_staged(sender: Sender, staged: _Staged) -> Digests:
        for bucket, held in staged.buckets:
            flat = sender.buffer(bucket.num_bytes)
            sender.send(bucket, flat.copy_(held, non_blocking=True))
            del flat  # before there is another one
        sender.settle()
        return staged.digests

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor of the last transfer, by name; on rank 0 only."""
        return self._sent.by_name()

    def unchanged(self) -> dict[str, float]:
        """Return the share of bytes of the last transfer that have not changed since the last call.

        Its name is `weights/unchanged`; {} if there are not two updates to compare. On rank 0 only.
        """
        before, self._compared = self._compared, self._sent
        if before is self._sent or not (earlier := before.by_name()):
            return {}
        sent = self._sent.by_name()
        sizes = {one.name: one.num_bytes for one in self.headers() if one.name in sent}
        same = sum(size for name, size in sizes.items() if sent[name] == earlier.get(name))
        return {"weights/unchanged": same / sum(sizes.values())}

    def leave(self) -> None:
        """Close the connection. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _host_buffer(self, num_bytes: int) -> torch.Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        return flat if self._pinned is None else self._pinned(flat)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self._counted(self._backend.transfer_weights())
        if not self._frees_gradients:
            yield from weights
            return
        with self._backend.without_gradient_buffers():
            yield from weights

    @staticmethod
    def _exhaust(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in weights:
            pass
