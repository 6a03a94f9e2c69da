"""Weights from one process to another over each transport: do both ends have the same bytes?"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_parts.part import Found, Part

from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.cluster.ports import free_port
from telescope_train.weights.digests import Digests
from telescope_train.weights.transport import load_transport, receive, send

NUM_TENSORS = 32
LIMIT_S = 100.0
"""Longest that a transfer may take, the start of the other process included, in seconds."""


def tensors(num_bytes: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same random weights in every process."""
    drawn = torch.Generator().manual_seed(0)
    for number in range(NUM_TENSORS):
        values = torch.randint(0, 256, (num_bytes // NUM_TENSORS,), generator=drawn)
        yield f"t{number}", values.to(torch.uint8).to(device)


def headers(num_bytes: int) -> list[TensorHeader]:
    """Describe `tensors`."""
    shape = (num_bytes // NUM_TENSORS,)
    return [TensorHeader(name=f"t{n}", dtype="uint8", shape=shape) for n in range(NUM_TENSORS)]


def take(place: Place, num_bytes: int, device: str, answers: Any, is_over: Any) -> None:
    """Be a worker, in a process of its own: receive, and say the digest."""
    digests, on = Digests(), torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    receiver = load_transport(place.wire.transport).receiver(place, rank=1, device=on)
    known, limit = headers(num_bytes), place.wire.bucket_bytes
    for _ in receive(receiver, known, digests, bucket_bytes=limit):
        pass
    answers.put(digests.whole())
    is_over.wait()  # with what was received, until the sender knows of it
    receiver.close()


def transfer(name: str, num_bytes: int, devices: tuple[str, str], folder: str) -> Found:
    """Send weights to another process, and compare the digests of both ends."""
    wire = Wire(transport=name, bucket_bytes=num_bytes // 4, folder=folder)
    place = Place(wire=wire, host="127.0.0.1", port=free_port(), world_size=2)
    transport = load_transport(name)
    context = multiprocessing.get_context("spawn")
    answers, is_over = context.Queue(), context.Event()
    told = (place, num_bytes, devices[1], answers, is_over)
    worker = context.Process(target=take, args=told)
    if not transport.is_stored:
        worker.start()
    sender = transport.sender(
        place, device=torch.device(devices[0]), listen_fd=None, wait_s=LIMIT_S
    )
    given = list(tensors(num_bytes, devices[0]))
    started_s = time.perf_counter()
    digest = send(sender, headers(num_bytes), given, bucket_bytes=wire.bucket_bytes).whole()
    seconds = time.perf_counter() - started_s
    if transport.is_stored:
        worker.start()
    try:
        held = answers.get(timeout=LIMIT_S)
    finally:
        is_over.set()
        sender.close()
        worker.join(LIMIT_S)
    speed = num_bytes / seconds / 1e9
    said = "equal" if held == digest else "DIFFER"
    return Found(text=f"{speed:.2f} GB/s, digests {said}", is_met=held == digest)


def parts(num_mib: int) -> Iterator[Part]:
    """Yield one part for each transport."""
    ways = {
        "gloo": (0, ("cpu", "cpu")),
        "disk": (0, ("cpu", "cpu")),
        "ipc": (1, ("cuda:0", "cuda:0")),
        "nccl": (2, ("cuda:0", "cuda:1")),
    }
    for name, (num_gpus, devices) in ways.items():

        def run(name: str = name, devices: tuple[str, str] = devices) -> Found:
            with tempfile.TemporaryDirectory() as folder:
                return transfer(name, num_mib * 2**20, devices, str(Path(folder) / "weights"))

        # On how many GB/s a transfer must have, a limit can be set once one was measured.
        yield Part(
            name=f"weights over {name}, {num_mib} MiB (G4)",
            limit="equal digests",
            run=run,
            num_gpus=num_gpus,
        )
