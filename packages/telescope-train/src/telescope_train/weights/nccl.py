"""`nccl`: weights from the GPU of trainer rank 0 to those of all workers, through vLLM's own NCCL.

The parts that need a GPU are behind `Fabric`, so a test without one replaces only that.
"""

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from telescope_train.backends.transfer import Place
from telescope_train.weights.transport import JOIN_DEADLINE_S, TRANSFER_DEADLINE_S, Bucket

_POLL_S = 0.001
_ASK_EVERY_S = 0.5
"""Seconds between two questions to the store, each of which is a message to rank 0."""
_ADVICE = (
    "NCCL says why with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 helps where GPUs of one machine cannot "
    "reach each other, and weight_transport = 'gloo' sends weights without NCCL"
)
_LEFT = "telescope-has-left"  # the key that rank 0 sets in the store as it leaves


class Fabric(Protocol):
    """The part of NCCL that is used here. Work is queued in the device's current stream."""

    def broadcast(self, flat: torch.Tensor) -> None:
        """Queue the sending of `flat` from rank 0, or the receiving into it."""
        ...

    def reached(self) -> Callable[[], bool]:
        """Return a function that tells whether all work queued so far is done."""
        ...

    def is_left(self) -> bool:
        """Return whether rank 0 has left, or died."""
        ...

    def leave(self) -> None:
        """Abort queued work, and leave."""
        ...


class Communicator:
    """vLLM's NCCL communicator of rank 0 and all workers."""

    def __init__(
        self,
        place: Place,
        *,
        rank: int,
        device: torch.device,
        listen_fd: int | None = None,
        wait_s: float | None = None,
    ) -> None:
        """Join; returns when all members have joined."""
        # Imported late: vLLM takes seconds, and only who sends over NCCL needs it in the trainer.
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        limit_s = wait_s or JOIN_DEADLINE_S
        group = StatelessProcessGroup.create(
            host=place.host,
            port=place.port,
            rank=rank,
            world_size=place.world_size,
            store_timeout=round(limit_s),
            listen_socket=None if listen_fd is None else socket.socket(fileno=listen_fd),
        )
        self._rank, self._store = rank, group.store
        with unpinned_nccl_env():
            # In two steps, so that what has come of it can be aborted.
            self._communicator: Any = PyNcclCommunicator.__new__(PyNcclCommunicator)
            join_within(
                limit_s,
                _advised()(lambda: self._communicator.__init__(group, device=device)),
                abort=self._abort_joining,
            )
        if self._communicator.disabled:  # it would send nothing, without a word
            raise RuntimeError("vLLM finds no NCCL that it may use; is VLLM_DISABLE_PYNCCL set?")

    def _abort_joining(self) -> None:
        if hasattr(self._communicator, "comm"):
            self._communicator.destroy()  # which ends the first reduction, that is on the GPU
        self._communicator.disabled = True  # if it is not: there will be none

    def broadcast(self, flat: torch.Tensor) -> None:
        """Queue one broadcast from rank 0."""
        with _advised():
            self._communicator.broadcast(flat, src=0, stream=torch.cuda.current_stream())

    def reached(self) -> Callable[[], bool]:
        """Return a function that says whether all work queued up to now is done."""
        event = torch.cuda.Event()
        event.record()
        return event.query

    def is_left(self) -> bool:
        """Return whether rank 0 has left, or died, of which NCCL tells nobody."""
        try:
            return bool(self._store.check([_LEFT]))
        except RuntimeError:
            return True  # the store is in the process of rank 0

    def leave(self) -> None:
        """Abort the communicator."""
        if self._rank == 0:
            with suppress(RuntimeError):
                self._store.set(_LEFT, "")
        self._communicator.destroy()


@contextmanager
def _advised() -> Generator[None, None, None]:
    """Add to an error of NCCL, which is one of a few words, what to do."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("NCCL error"):
            raise RuntimeError(f"{error}; {_ADVICE}") from error
        raise


def join_within(limit_s: float, join: Callable[[], None], *, abort: Callable[[], None]) -> None:
    """Return when `join` does; raises its error, or RuntimeError after `limit_s` seconds.

    Once all members have met, NCCL connects them without a deadline: if one of them dies then, the
    others wait for ever. `abort` ends what can be ended of that. A thread that waits in NCCL itself
    stays behind; it has queued nothing on the GPU, and the next group is another one.
    """
    outcome: list[Exception | None] = []

    def work() -> None:
        try:
            join()
            outcome.append(None)
        except (RuntimeError, OSError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="joining over NCCL", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        abort()
        raise RuntimeError(
            f"NCCL did not connect all members within {limit_s:g} s after they had met: one of "
            f"them has died, or cannot reach another; {_ADVICE}"
        )
    if not outcome:
        raise RuntimeError("joining over NCCL has failed; the error is in this process's log")
    if outcome[0] is not None:
        raise outcome[0]


class _End:
    """Common to both ends: queue one broadcast for each bucket, wait for at most two of them."""

    def __init__(self, fabric: Fabric, device: torch.device, wait_s: float | None = None) -> None:
        self._fabric = fabric
        self._device = device
        self._wait_s = wait_s or TRANSFER_DEADLINE_S
        self._before: Callable[[], bool] | None = None
        """Whether the previous bucket is done; None = there is none."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        # A buffer that is freed while it is still being sent is not given out before that has
        # ended: its next user queues in the same stream.
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def queue(self, flat: torch.Tensor) -> None:
        self._fabric.broadcast(flat)
        reached = self._fabric.reached()
        if self._before is not None:
            self._until(self._before)
        self._before = reached

    def settle(self) -> None:
        if self._before is not None:
            self._until(self._before)
            self._before = None

    def _until(self, reached: Callable[[], bool]) -> None:
        # NCCL itself waits for ever for a member that is gone.
        give_up_s = time.monotonic() + self._wait_s
        ask_s = time.monotonic() + _ASK_EVERY_S
        while not reached():
            now_s = time.monotonic()
            if now_s > give_up_s:
                raise RuntimeError(
                    f"a broadcast over NCCL did not end within {self._wait_s:g} s: another "
                    f"member takes no part, or cannot be reached; {_ADVICE}"
                )
            if now_s > ask_s:
                if self._fabric.is_left():
                    raise RuntimeError("trainer rank 0 has left in the middle of a transfer")
                ask_s = now_s + _ASK_EVERY_S
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._fabric.leave()


class _NcclSender(_End):
    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.queue(flat)


class _NcclReceiver(_End):
    def receive(self, bucket: Bucket) -> torch.Tensor:
        flat = self.buffer(bucket.num_bytes)
        # Its readers queue in the same stream.
        self.queue(flat)
        return flat


class NcclTransport:
    """Transport from GPU to GPU, on one machine or between machines."""

    is_stored = False

    def __init__(self, join: Callable[..., Fabric] = Communicator) -> None:
        """`join` creates the fabric of one member."""
        self._join = join

    def sender(
        self, place: Place, *, device: torch.device, listen_fd: int | None, wait_s: float | None
    ) -> _NcclSender:
        """Join as rank 0; see `WeightTransport`."""
        fabric = self._join(place, rank=0, device=device, listen_fd=listen_fd, wait_s=wait_s)
        return _NcclSender(fabric, device, wait_s)

    def receiver(self, place: Place, *, rank: int, device: torch.device) -> _NcclReceiver:
        """Join as a worker; see `WeightTransport`."""
        return _NcclReceiver(self._join(place, rank=rank, device=device), device)


TRANSPORT = NcclTransport()
