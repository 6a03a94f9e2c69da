"""`ipc`: weights within one GPU that trainer rank 0 and the servers share.

Rank 0 keeps one buffer, which every worker maps into its own memory. A bucket is written there and
copied by each worker; a gloo group tells the workers when it is there, and rank 0 when all have it.
The parts that need a GPU are behind `SharedMemory`. No message is unpickled: handles travel as
numbers and bytes.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from telescope_train.backends.transfer import Place
from telescope_train.weights.gloo import GlooGroup
from telescope_train.weights.transport import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Data with which another process maps a buffer; bytes are hexadecimal."""

    allocation: str
    """Handle of the allocation that contains the buffer."""
    size_bytes: int
    offset_bytes: int
    """Offset of the buffer in the allocation."""
    ref_counter: str
    ref_counter_offset: int
    event: str
    event_sync_required: bool


class SharedMemory(Protocol):
    """The part of CUDA that is used here."""

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return [bytes] uint8 that can be shared."""
        ...

    def share(self, buffer: torch.Tensor) -> Handle:
        """Return the handle for `mapped` in another process."""
        ...

    def mapped(self, handle: Handle, device: torch.device) -> torch.Tensor:
        """Return the same memory in this process."""
        ...

    def synchronize(self) -> None:
        """Return when all work of this process on the GPU is done."""
        ...

    def collect(self) -> None:
        """Free shared buffers that nobody maps any more."""
        ...


class CudaMemory:
    """Memory of this process's GPU, through torch's CUDA IPC."""

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return [bytes] uint8 on the GPU."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, buffer: torch.Tensor) -> Handle:
        """Return the same handle as torch's pickling."""
        (
            _,  # the number of the GPU, which is another one where other GPUs are visible
            allocation,
            size_bytes,
            offset_bytes,
            ref_counter,
            ref_counter_offset,
            event,
            event_sync_required,
        ) = buffer.untyped_storage()._share_cuda_()
        return Handle(
            allocation=allocation.hex(),
            size_bytes=size_bytes,
            offset_bytes=offset_bytes,
            ref_counter=ref_counter.hex(),
            ref_counter_offset=ref_counter_offset,
            event=event.hex(),
            event_sync_required=event_sync_required,
        )

    def mapped(self, handle: Handle, device: torch.device) -> torch.Tensor:
        """Map the buffer of another process."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor(**rebuild_arguments(handle, device.index or 0))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def collect(self) -> None:
        """Free the buffers that other processes have unmapped."""
        torch.cuda.ipc_collect()


def rebuild_arguments(handle: Handle, device_index: int) -> dict[str, Any]:
    """Return the arguments of torch's `rebuild_cuda_tensor` for a buffer of bytes."""
    return {
        "tensor_cls": torch.Tensor,
        "tensor_size": (handle.size_bytes,),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.UntypedStorage,
        "dtype": torch.uint8,
        "storage_device": device_index,
        "storage_handle": bytes.fromhex(handle.allocation),
        "storage_size_bytes": handle.size_bytes,
        "storage_offset_bytes": handle.offset_bytes,
        "requires_grad": False,
        "ref_counter_handle": bytes.fromhex(handle.ref_counter),
        "ref_counter_offset": handle.ref_counter_offset,
        "event_handle": bytes.fromhex(handle.event),
        "event_sync_required": handle.event_sync_required,
    }


class _IpcSender:
    def __init__(self, memory: SharedMemory, group: GlooGroup, device: torch.device) -> None:
        self._memory = memory
        self._group = group
        self._device = device
        self._buffer: torch.Tensor | None = None
        self._told = 0
        """Size of the buffer that the workers know."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < num_bytes:
            # Before there is another one. Its memory is free once the workers have unmapped it too,
            # which they do when they hear of the next; most models begin with their largest tensor.
            self._buffer = None
            self._memory.collect()
            self._buffer = self._memory.buffer(num_bytes, self._device)
            self._told = 0
        return self._buffer[:num_bytes]

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        assert self._buffer is not None, "buffer comes first"
        self._memory.synchronize()
        told = b""
        if self._told != len(self._buffer):
            told = json.dumps(asdict(self._memory.share(self._buffer))).encode()
            self._told = len(self._buffer)
        self._group.broadcast(torch.tensor([len(told)]))
        if told:
            self._group.broadcast(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        # Until every worker has copied the bucket, the next one must not be written.
        self._group.meet()

    def settle(self) -> None:
        """Release the memory, after the workers have released it."""
        self._buffer = None
        self._memory.collect()

    def close(self) -> None:
        self._buffer = None
        self._group.close()


class _IpcReceiver:
    def __init__(self, memory: SharedMemory, group: GlooGroup, device: torch.device) -> None:
        self._memory = memory
        self._group = group
        self._device = device
        self._mapped: torch.Tensor | None = None

    def receive(self, bucket: Bucket) -> torch.Tensor:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.broadcast(size)
        if num_bytes := int(size.item()):
            told = torch.empty(num_bytes, dtype=torch.uint8)
            self._group.broadcast(told)
            self._mapped = None  # before there is another one
            handle = Handle(**json.loads(bytes(told.tolist())))
            self._mapped = self._memory.mapped(handle, self._device)
        assert self._mapped is not None, "the first bucket comes with a handle"
        flat = self._mapped[: bucket.num_bytes].clone()
        self._memory.synchronize()
        self._group.meet()
        return flat

    def settle(self) -> None:
        self._mapped = None

    def close(self) -> None:
        self._mapped = None
        self._group.close()


class IpcTransport:
    """Transport within one GPU, which both ends must use."""

    is_stored = False

    def __init__(self, memory: SharedMemory | None = None) -> None:
        """`memory`: that of the GPU; None = CUDA's."""
        self._memory: SharedMemory = memory or CudaMemory()

    def sender(
        self, place: Place, *, device: torch.device, listen_fd: int | None, wait_s: float | None
    ) -> _IpcSender:
        """Join as rank 0; see `WeightTransport`."""
        group = GlooGroup(place, rank=0, listen_fd=listen_fd, wait_s=wait_s)
        return _IpcSender(self._memory, group, device)

    def receiver(self, place: Place, *, rank: int, device: torch.device) -> _IpcReceiver:
        """Join as a worker; see `WeightTransport`."""
        return _IpcReceiver(self._memory, GlooGroup(place, rank=rank), device)


TRANSPORT = IpcTransport()
