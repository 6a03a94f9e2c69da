"""What every transport keeps, whatever moves the bytes. NCCL and CUDA IPC are stand-ins here."""

import gc
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import entry_points

import pytest
import torch
from tests.train.weights.conftest import TRANSPORTS, equal, headers_of, odd_tensors

from telescope_core.errors import UnknownNameError
from telescope_train.config.inference_section import TRANSPORTS_GROUP
from telescope_train.weights.digests import Digests
from telescope_train.weights.ipc import Handle, rebuild_arguments
from telescope_train.weights.transport import load_transport, receive, send

pytestmark = pytest.mark.parametrize("name", TRANSPORTS)


def test_the_entry_point_names_a_transport(name):
    assert name in entry_points(group=TRANSPORTS_GROUP).names
    assert load_transport(name).is_stored == (name == "disk")


@pytest.mark.parametrize("bucket_bytes", [0, 100, 1000, 10**6])
def test_every_worker_gets_every_tensor_as_it_was_sent(ends, name, bucket_bytes):
    updates = [odd_tensors(seed) for seed in range(3)]
    for sent, (digest, *workers) in zip(
        updates, ends(name, bucket_bytes=bucket_bytes).transfer(*updates), strict=True
    ):
        ((got, held),) = workers
        assert equal(got, sent)
        assert held == digest


def test_what_is_written_is_for_whom_the_umask_allows(ends, name, tmp_path):
    ends(name).transfer(odd_tensors(1))
    written = list(tmp_path.rglob("*.safetensors"))
    assert bool(written) is (name == "disk")
    for path in written:
        assert path.stat().st_mode & 0o666 == path.parent.stat().st_mode & 0o666


@pytest.mark.parametrize(("servers", "workers"), [(1, 2), (2, 1), (2, 2)])
def test_two_servers_and_servers_of_two_workers(ends, name, servers, workers):
    sent = odd_tensors(5)
    ((digest, *held),) = ends(name, servers=servers, workers=workers).transfer(sent)
    assert len(held) == servers * workers
    assert all(equal(got, sent) and one == digest for got, one in held)


def lies() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    truth = odd_tensors(1)
    yield "after three (float32, [5, 3])", {**truth, "after three": torch.zeros(3, 5)}
    yield "one (bfloat16, [1])", {**truth, "one": torch.zeros(1)}
    yield "got nothing", {name: truth[name] for name in list(truth)[:-1]}
    yield "got extra", {**truth, "extra": torch.zeros(2)}
    yield "scalar", {name: truth[name] for name in sorted(truth, reverse=True)}


@pytest.mark.parametrize(("told", "given"), lies())
def test_a_source_that_lies_is_found_at_the_first_tensor(ends, name, told, given):
    both = ends(name)
    headers = headers_of(odd_tensors(1))

    def rank_0() -> None:
        sender = both.sender()
        try:
            send(sender, headers, iter(given.items()), bucket_bytes=1000)
        finally:
            sender.close()

    def worker(number: int) -> None:
        receiver = both.receiver(number)
        list(receive(receiver, headers, Digests(), bucket_bytes=1000))

    said, _ = both.run(rank_0, worker)
    assert isinstance(said, ValueError)
    assert "headers of a backend must" in str(said)
    if told.startswith(("got", "one", "after")):
        assert told in str(said)


def test_workers_notice_a_sender_that_is_gone(ends, name):
    both = ends(name, servers=2)
    sent = odd_tensors(2)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(sent.items())[:4]
        raise RuntimeError("killed")

    def rank_0() -> None:
        sender = both.sender()
        try:
            send(sender, headers_of(sent), dying(), bucket_bytes=100)
        finally:
            sender.close()

    def worker(number: int) -> None:
        receiver, digests = both.receiver(number), Digests()
        try:
            list(receive(receiver, headers_of(sent), digests, bucket_bytes=100))
        finally:
            receiver.close()

    of_rank_0, *of_workers = both.run(rank_0, worker)
    assert str(of_rank_0) == "killed"
    # And nobody has taken a part for the whole.
    assert all(isinstance(one, RuntimeError) for one in of_workers)


def test_a_transfer_holds_at_most_two_buckets(ends, name):
    """Counts the bytes that rank 0 holds: what it was given, and what it copied it to."""
    both = ends(name, bucket_bytes=4096)
    model = {f"layer {n}": torch.full((16, 32), float(n)) for n in range(64)}
    held, most = 0, 0

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held, most
        size = tensor.nbytes
        held += size
        most = max(most, held)

        def gone() -> None:
            nonlocal held
            held -= size

        # Views, such as the part of a buffer that is sent, keep the storage and not the tensor.
        weakref.finalize(tensor.untyped_storage(), gone)
        return tensor

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in model.items():
            yield key, counted(tensor.clone())

    def rank_0() -> str:
        sender = both.sender()
        buffer, made = sender.buffer, weakref.WeakSet[torch.UntypedStorage]()

        def counted_buffer(num_bytes: int) -> torch.Tensor:
            flat = buffer(num_bytes)
            if flat.untyped_storage() not in made:
                made.add(flat.untyped_storage())
                counted(flat)
            return flat

        sender.buffer = counted_buffer
        gc.disable()
        try:
            return send(sender, headers_of(model), gathered(), bucket_bytes=4096).whole()
        finally:
            gc.enable()

    def worker(number: int) -> str:
        digests = Digests()
        for _ in receive(both.receiver(number), headers_of(model), digests, bucket_bytes=4096):
            pass
        return digests.whole()

    digest, received = both.run(rank_0, worker)
    assert digest == received
    assert 4096 < most <= 2 * 4096


def test_an_unknown_transport_names_the_nearest(name):
    with pytest.raises(UnknownNameError, match=f"'{name}x'.*'{name}'"):
        load_transport(name + "x")
    assert load_transport(name).is_stored is (name == "disk")


def test_what_torch_needs_to_map_a_buffer_is_what_is_sent(name):
    """Our handle against torch's own signature, which the GPU build shares."""
    if name != "ipc":
        return
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    values = {one.name: 0 if one.type is int else "00" for one in fields(Handle)}
    given = rebuild_arguments(Handle(**values), 3)
    assert list(given) == list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert given["storage_device"] == 3
