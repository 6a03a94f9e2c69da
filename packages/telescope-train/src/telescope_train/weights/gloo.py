"""`gloo`: weights over TCP, from the CPU memory of trainer rank 0 to that of each worker."""

from datetime import timedelta

import torch
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    TCPStore,
)

from telescope_train.backends.transfer import Place
from telescope_train.weights.transport import JOIN_DEADLINE_S, TRANSFER_DEADLINE_S, Bucket


class GlooGroup:
    """Broadcasts from rank 0 to all other ranks.

    Every wait ends after `TRANSFER_DEADLINE_S`, or `wait_s`.
    """

    def __init__(
        self,
        place: Place,
        *,
        rank: int,
        listen_fd: int | None = None,
        wait_s: float | None = None,
    ) -> None:
        """Join the group; returns when all of its members have joined.

        Rank 0 listens at `place.port`, or uses the socket `listen_fd`, which already listens there.
        `wait_s`: longest wait of this member for others; None = the deadlines above.
        """
        timeout = timedelta(seconds=wait_s or JOIN_DEADLINE_S)
        # Put together by hand, as torch does inside: init_process_group allows one world per
        # process, and both sides have theirs already, the trainer's ranks and vLLM's workers.
        # No wait for workers here, because the group below waits for all members itself.
        # The tcp store must outlive the group: gloo keeps no reference to it.
        self._tcp_store = TCPStore(
            place.host,
            place.port,
            place.world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        store = PrefixStore("telescope-weights", self._tcp_store)
        backend = ProcessGroupGloo(store, rank, place.world_size, timeout=timeout)
        backend._set_sequence_number_for_group()
        backend._set_default_timeout(timedelta(seconds=wait_s or TRANSFER_DEADLINE_S))
        self._group = ProcessGroup(store, rank, place.world_size)
        self._group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)

    def close(self) -> None:
        """Leave the group. Members that wait for this one fail at once. Idempotent."""
        # The connections end with the objects; a traceback may hold this one for longer.
        self.__dict__.clear()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send `tensor` from rank 0, or receive into it on the others; returns when done."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # wait() raises when the deadline has passed or another member has gone.
        self._group.broadcast([tensor], options).wait()

    def meet(self) -> None:
        """Return when every member has called this."""
        self._group.allreduce([torch.zeros(1)], AllreduceOptions()).wait()


class _GlooSender:
    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        # Used again, because gloo's own thread lets go of a buffer a moment after its broadcast.
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # before there is another one
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._group.broadcast(flat)

    def settle(self) -> None:
        # Nothing is on its way: each broadcast was waited for.
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self._group.close()


class _GlooReceiver:
    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def receive(self, bucket: Bucket) -> torch.Tensor:
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        self._group.broadcast(flat)
        return flat

    def settle(self) -> None:
        """Do nothing: each broadcast was already awaited."""

    def close(self) -> None:
        self._group.close()


class GlooTransport:
    """Transport for all machines; a GPU's weights pass through CPU memory."""

    is_stored = False

    def sender(
        self, place: Place, *, device: torch.device, listen_fd: int | None, wait_s: float | None
    ) -> _GlooSender:
        """Join as rank 0; see `WeightTransport`."""
        return _GlooSender(GlooGroup(place, rank=0, listen_fd=listen_fd, wait_s=wait_s))

    def receiver(self, place: Place, *, rank: int, device: torch.device) -> _GlooReceiver:
        """Join as a worker; see `WeightTransport`."""
        return _GlooReceiver(GlooGroup(place, rank=rank))


TRANSPORT = GlooTransport()
