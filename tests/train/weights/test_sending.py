"""What a trainer rank does in an update: gathered once, described without gathering, staged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.train.weights.conftest import CPU, Ends, equal, headers_of, odd_tensors

from telescope_train.backends.protocol import TransferError, TransferMemoryError
from telescope_train.backends.transfer import TensorHeader
from telescope_train.cluster.ports import HeldPort
from telescope_train.config.inference_section import WeightsSection
from telescope_train.weights import sending as module
from telescope_train.weights.digests import Digests
from telescope_train.weights.sending import WeightSending
from telescope_train.weights.transport import receive


class Backend:
    """Counts how often its weights are gone through to the end."""

    def __init__(self) -> None:
        self.weights = odd_tensors(3)
        self.rounds = 0
        self.has_buffers = True
        self.had_buffers = set[bool]()

    def transfer_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for one in self.weights.items():
            self.had_buffers.add(self.has_buffers)
            yield one
        self.rounds += 1

    def transfer_headers(self) -> Sequence[TensorHeader]:
        return headers_of(self.weights)

    @contextmanager
    def without_gradient_buffers(self) -> Iterator[None]:
        self.has_buffers = False
        yield
        self.has_buffers = True


@pytest.fixture(params=["gloo", "disk", "nccl", "ipc"])
def both(
    request: pytest.FixtureRequest, ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> Ends:
    """Both ends, as the rank finds them by name."""
    made = ends(request.param)
    monkeypatch.setattr(module, "load_transport", lambda name: made.transport)
    return made


def rank(backend: Backend, **settings: Any) -> WeightSending:
    return WeightSending(
        backend, WeightsSection(**settings), device=CPU, held_port=HeldPort(), counted=iter
    )


def received(both: Ends, backend: Backend, number: int, times: int = 1) -> list[Any]:
    receiver = both.receiver(number)
    found = []
    for _ in range(times):
        digests = Digests()
        headers, limit = backend.transfer_headers(), both.place.wire.bucket_bytes
        got = dict(receive(receiver, headers, digests, bucket_bytes=limit))
        found.append((got, digests.whole()))
    return found


LIVE = pytest.mark.parametrize("both", ["gloo", "nccl", "ipc"], indirect=True)
"""Transports that need servers to take part while weights are sent."""


@LIVE
def test_weights_are_gathered_once_and_not_to_be_described(both):
    backend = Backend()
    sending, other = rank(backend), rank(backend)
    assert sending.headers() == list(backend.transfer_headers())
    assert backend.rounds == 0

    def rank_0() -> str:
        sending.connect(both.place, None)
        return sending.send()

    digest, ((got, held),) = both.run(rank_0, lambda number: received(both, backend, number))
    assert equal(got, backend.weights)
    assert digest == held
    assert other.send() == "", "the other ranks only gather"
    assert backend.rounds == 2


def test_what_is_staged_is_sent_as_often_as_needed_and_never_what_came_after(both):
    backend, sending = Backend(), None
    sending, other = rank(backend), rank(backend)
    sending.stage(both.place.wire, is_sender=True)
    other.stage(both.place.wire, is_sender=False)
    staged = {name: one.clone() for name, one in backend.weights.items()}
    for one in backend.weights.values():
        one.add_(1)

    def rank_0() -> list[str]:
        sending.connect(both.place, None)
        return [sending.send(), sending.send()]

    digests, found = both.run(rank_0, lambda number: received(both, backend, number, times=2))
    assert all(equal(got, staged) for got, _ in found)
    # What servers read from files, rank 0 has sent when it staged them.
    assert [held for _, held in found] == digests
    assert [other.send(), other.send()] == ["", ""]
    assert backend.rounds == 2, "every rank has gathered once"


def test_what_an_update_leaves_as_it_was_is_known(both):
    """Of three updates, the second changes one tensor, and the third none."""
    backend = Backend()
    sending, shares = rank(backend), list[dict[str, float]]()
    changed = max(backend.weights.values(), key=torch.Tensor.numel)

    def update() -> None:
        sending.stage(both.place.wire, is_sender=True)
        sending.send()
        shares.append(sending.unchanged())

    def rank_0() -> None:
        sending.connect(both.place, None)
        update()
        changed.add_(1)
        update()
        update()

    both.run(rank_0, lambda number: received(both, backend, number, times=3))
    whole = sum(one.num_bytes for one in sending.headers())
    left = 1 - changed.nbytes / whole
    assert shares == [{}, {"weights/unchanged": pytest.approx(left)}, {"weights/unchanged": 1.0}]
    assert sending.unchanged() == {}, "nothing was sent since"


@LIVE
def test_a_sender_that_cannot_send_leaves_and_still_gathers(both, monkeypatch):
    backend = Backend()
    sending = rank(backend)

    class Broken:
        closed = 0

        def buffer(self, num_bytes: int) -> torch.Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

        def send(self, *_: object) -> None:
            raise RuntimeError("connection closed by peer")

        def close(self) -> None:
            Broken.closed += 1

    monkeypatch.setattr(both.transport, "sender", lambda *_, **__: Broken(), raising=False)
    sending.connect(both.place, None)
    with pytest.raises(TransferError, match="connection closed by peer"):
        sending.send()
    assert (Broken.closed, backend.rounds) == (1, 1)


@LIVE
def test_a_gpu_without_memory_is_no_receivers_doing(both, monkeypatch):
    """A TransferError would end innocent servers, and be tried again."""
    backend = Backend()
    sending = rank(backend)

    class Full:
        closed = 0

        def buffer(self, num_bytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 is.")

        def close(self) -> None:
            Full.closed += 1

    monkeypatch.setattr(both.transport, "sender", lambda *_, **__: Full(), raising=False)
    sending.connect(both.place, None)
    with pytest.raises(TransferMemoryError, match=r"^trainer rank 0 .* 9 GiB. GPU 0 is$"):
        sending.send()
    assert (Full.closed, backend.rounds) == (1, 1), "it leaves, and gathers to the end"


@LIVE
def test_a_gpu_without_memory_is_told_at_joining_and_at_gathering_too(both, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(both.transport, "sender", full, raising=False)
    backend = Backend()
    with pytest.raises(TransferMemoryError, match="no room"):
        rank(backend).connect(both.place, None)
    monkeypatch.setattr(backend, "transfer_weights", full)
    with pytest.raises(TransferMemoryError, match="no room"):
        rank(backend).stage(both.place.wire, is_sender=False)
    with pytest.raises(TransferMemoryError, match="no room"):
        rank(backend).send()


def test_page_locked_memory_is_asked_for_where_there_is_a_gpu(ends, monkeypatch):
    made = ends("gloo")
    monkeypatch.setattr(module, "load_transport", lambda name: made.transport)
    pinned: list[int] = []

    def pin(flat: torch.Tensor) -> torch.Tensor:
        pinned.append(len(flat))
        return flat

    for device, wanted, expected in (
        ("cuda", "pinned", True),
        ("cuda", "pageable", False),
        ("cpu", "pinned", False),
    ):
        pinned.clear()
        sending = WeightSending(
            Backend(),
            WeightsSection(weight_broadcast_staging=wanted),
            device=torch.device(device),
            held_port=HeldPort(),
            pinned=pin,
        )
        sending.stage(made.place.wire, is_sender=True)
        assert bool(pinned) is expected


@pytest.mark.parametrize("frees", [True, False])
def test_gradient_buffers_are_given_back_while_weights_are_gathered(frees):
    backend = Backend()
    rank(backend, weight_broadcast_free_grad_buffers=frees).send()
    assert backend.had_buffers == {not frees}
    assert backend.has_buffers, "and come back"
