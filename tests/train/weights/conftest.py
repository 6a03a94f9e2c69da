"""Stand-ins for what needs a GPU, and both ends of a transport in one process."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.ports import free_port

from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.weights import nccl
from telescope_train.weights.digests import Digests
from telescope_train.weights.disk import DiskTransport
from telescope_train.weights.gloo import GlooTransport
from telescope_train.weights.ipc import Handle, IpcTransport
from telescope_train.weights.nccl import NcclTransport
from telescope_train.weights.transport import WeightTransport, receive, send

WAIT_S = 120.0
CPU = torch.device("cpu")
TRANSPORTS = ("gloo", "disk", "nccl", "ipc")


class Fabric:
    """NCCL's broadcast between threads; both ends must name the same number of bytes."""

    def __init__(self, place: Place, *, rank: int, **_: Any) -> None:
        self._inboxes, self._rank, self._world = self.members(place), rank, place.world_size
        self._is_stuck = False

    hub: ClassVar[dict[int, dict[int, "queue.Queue[torch.Tensor | None]"]]] = {}
    lock = threading.Lock()

    @classmethod
    def members(cls, place: Place) -> dict[int, "queue.Queue[torch.Tensor | None]"]:
        with cls.lock:
            new = {rank: queue.Queue[torch.Tensor | None]() for rank in range(place.world_size)}
            return cls.hub.setdefault(place.port, new)

    def broadcast(self, flat: torch.Tensor) -> None:
        assert flat.is_contiguous()
        if self._rank == 0:
            for rank in range(1, self._world):
                self._inboxes[rank].put(flat.clone())
            return
        # As in NCCL, which queues what will never end if a member has left.
        got = None if self._is_stuck else self._inboxes[self._rank].get(timeout=WAIT_S)
        self._is_stuck = got is None
        if got is None:
            return
        assert got.shape == flat.shape, "the ends split the stream differently"
        flat.copy_(got)

    def reached(self) -> Callable[[], bool]:
        return lambda: not self._is_stuck

    def is_left(self) -> bool:
        return self._is_stuck

    def leave(self) -> None:
        if self._rank == 0:
            for inbox in self._inboxes.values():
                inbox.put(None)


@dataclass
class SharedTable:
    """CUDA IPC as a table from handles to memory."""

    shared: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    largest: int = 0

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        self.largest = max(self.largest, num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def share(self, buffer: torch.Tensor) -> Handle:
        key = f"{len(self.shared):02x}"
        self.shared[key] = buffer
        return Handle(
            allocation=key,
            size_bytes=len(buffer),
            offset_bytes=0,
            ref_counter="",
            ref_counter_offset=0,
            event="",
            event_sync_required=False,
        )

    def mapped(self, handle: Handle, device: torch.device) -> torch.Tensor:
        return self.shared[handle.allocation]

    def synchronize(self) -> None:
        """Nothing runs beside."""

    def collect(self) -> None:
        """Nothing is kept."""


def transport_of(name: str) -> WeightTransport:
    """Return a transport whose device, if it needs one, is a stand-in."""
    made: dict[str, Callable[[], WeightTransport]] = {
        "gloo": GlooTransport,
        "disk": DiskTransport,
        "nccl": lambda: NcclTransport(Fabric),
        "ipc": lambda: IpcTransport(SharedTable()),
    }
    return made[name]()


@dataclass
class Ends:
    """Rank 0 and all workers of some servers."""

    transport: WeightTransport
    place: Place

    def run(self, of_rank_0: Callable[[], Any], of_worker: Callable[[int], Any]) -> list[Any]:
        """Run both sides at the same time; returns results or the exceptions, rank 0 first."""
        works = [of_rank_0, *(lambda n=n: of_worker(n) for n in range(1, self.place.world_size))]

        def outcome(work: Callable[[], Any]) -> Any:
            try:
                return work()
            except (RuntimeError, ValueError, AssertionError, queue.Empty) as error:
                return error

        if self.transport.is_stored:
            # Receivers take part only when everything is there.
            return [outcome(work) for work in works]
        with ThreadPoolExecutor(len(works)) as threads:
            return list(threads.map(outcome, works))

    def sender(self) -> Any:
        return self.transport.sender(self.place, device=CPU, listen_fd=None, wait_s=WAIT_S)

    def receiver(self, number: int) -> Any:
        return self.transport.receiver(self.place, rank=number, device=CPU)

    def transfer(self, *updates: dict[str, torch.Tensor]) -> list[list[Any]]:
        """Send each update; returns the digest of rank 0, then (tensors, digest) of each worker."""
        headers = [TensorHeader.from_tensor(*one) for one in updates[0].items()]
        sender = self.sender() if self.transport.is_stored else None
        receivers: dict[int, Any] = {}
        found: list[list[Any]] = []
        limit = self.place.wire.bucket_bytes

        def send_one(update: dict[str, torch.Tensor]) -> str:
            nonlocal sender
            sender = sender or self.sender()
            return send(sender, headers, iter(update.items()), bucket_bytes=limit).whole()

        def take(number: int) -> tuple[dict[str, torch.Tensor], str]:
            receivers[number] = receivers.get(number) or self.receiver(number)
            digests = Digests()
            got = receive(receivers[number], headers, digests, bucket_bytes=limit)
            return dict(got), digests.whole()

        for update in updates:
            found.append(self.run(lambda update=update: send_one(update), take))
        for one in (sender, *receivers.values()):
            one.close()
        return found


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ends]:
    """Both ends of a transport: name, size of buckets, servers and workers of each."""
    monkeypatch.setattr(nccl, "_ASK_EVERY_S", 0.0)

    def make(name: str, *, bucket_bytes: int = 1000, servers: int = 1, workers: int = 1) -> Ends:
        wire = Wire(
            transport=name,
            bucket_bytes=bucket_bytes,
            folder=str(tmp_path / "weights"),
            workers_per_server=workers,
        )
        place = Place(
            wire=wire, host="127.0.0.1", port=free_port(), world_size=1 + servers * workers
        )
        assert Place.from_json(place.as_json()) == place
        return Ends(transport_of(name), place)

    return make


def equal(got: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> bool:
    """Whether names, order, dtypes and bits are the same."""
    return list(got) == list(sent) and all(
        got[name].dtype == one.dtype and torch.equal(got[name], one) for name, one in sent.items()
    )


def odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that do not fit the rest: odd sizes, several dtypes, one larger than a bucket."""
    drawn = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).to(dtype)

    embedding = normal(50, 7, dtype=torch.bfloat16)
    return {
        "three": normal(3, dtype=torch.bfloat16),
        "after three": normal(5, 3),
        "embedding": embedding,
        "scalar": normal(),
        "tied": embedding,
        "nothing": normal(0, 4),
        "transposed": normal(9, 4).t(),
        "large": normal(40, 30),
        "one": normal(1, dtype=torch.bfloat16),
    }


def headers_of(tensors: dict[str, torch.Tensor]) -> Sequence[TensorHeader]:
    """Return the headers of all tensors."""
    return [TensorHeader.from_tensor(*one) for one in tensors.items()]
