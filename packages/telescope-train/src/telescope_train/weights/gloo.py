"""`GlooPublisher`: the side of trainer rank 0 in a weight transfer over gloo."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    TCPStore,
)

from telescope_train.weights.buckets import flattened, in_buckets, parts_of
from telescope_train.weights.digests import Digests

JOIN_DEADLINE_S = 60.0
"""Longest that members of a group wait for each other, in seconds."""
TRANSFER_DEADLINE_S = 120.0
"""Longest wait for the other side in a transfer, in seconds.

Shorter than `worker.COLLECTIVE_TIMEOUT_S`, for which the other trainer ranks wait for rank 0, so
rank 0 reports a lost server before the others take it for dead.
"""


class GlooPublisher:
    """Sends every tensor of the model to all servers at once."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        world_size: int,
        listen_fd: int | None = None,
        wait_s: float | None = None,
    ) -> None:
        """Join the servers at `port`; `listen_fd` is a socket that already listens there.

        `wait_s`: longest wait for them, here and in transfers; None = the deadlines above.
        """
        self._group = GlooGroup(
            host=host, port=port, rank=0, world_size=world_size, listen_fd=listen_fd, wait_s=wait_s
        )

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Digests:
        """Broadcast the tensors in order; returns when rank 0 has sent them all.

        Raises RuntimeError if another member has gone or does not take part.
        """
        digests = Digests()
        for bucket in in_buckets(tensors, lambda one: one[1].nbytes):
            flat = flattened([tensor for _, tensor in bucket])
            self._group.broadcast(flat)
            add_digests(digests, flat, [(name, tensor.nbytes) for name, tensor in bucket])
        return digests

    def close(self) -> None:
        """Leave the group. Members that wait for it fail at once."""
        self._group.close()


def add_digests(digests: Digests, flat: torch.Tensor, sizes: Sequence[tuple[str, int]]) -> None:
    """Add the tensors of one bucket, given as (name, bytes) in their order."""
    parts = parts_of(flat, [num_bytes for _, num_bytes in sizes])
    for (name, _), part in zip(sizes, parts, strict=True):
        digests.add(name, part)


class GlooGroup:
    """Broadcasts from rank 0 to all other ranks.

    Every wait ends after `TRANSFER_DEADLINE_S`, or `wait_s`.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        listen_fd: int | None = None,
        wait_s: float | None = None,
    ) -> None:
        """Join the group; returns when all of its `world_size` members have joined.

        Rank 0 listens at `port`, or goes on with the socket `listen_fd` that does so already.
        `wait_s`: longest wait of this member for others; None = the deadlines above.
        """
        timeout = timedelta(seconds=wait_s or JOIN_DEADLINE_S)
        # Put together by hand, as torch does inside: init_process_group allows one world per
        # process, and both sides have theirs already, the trainer's ranks and vLLM's workers.
        # No wait for workers here, because the group below waits for all members itself.
        # The tcp store must outlive the group: gloo keeps no reference to it.
        self._tcp_store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        store = PrefixStore("telescope-weights", self._tcp_store)
        backend = ProcessGroupGloo(store, rank, world_size, timeout=timeout)
        backend._set_sequence_number_for_group()
        backend._set_default_timeout(timedelta(seconds=wait_s or TRANSFER_DEADLINE_S))
        self._group = ProcessGroup(store, rank, world_size)
        self._group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)

    def close(self) -> None:
        """Leave the group."""
        # The connections end with the objects; a traceback may hold this one for longer.
        del self._group, self._tcp_store

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` from rank 0, or receive into it on the others; returns when done."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # wait() raises when the deadline has passed or another member has gone.
        self._group.broadcast([tensor], options).wait()
