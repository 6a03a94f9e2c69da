"""Speed and memory of single parts of training, each against its limit: G2 and G6 to G8.

Without a GPU the same code runs on a shape that is too small for its figures to mean anything.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from bench_training import BATCHES, DEVICE, ON_GPU, make_batches, make_sample, synchronise
from gpu_parts.part import Found, Part
from training.memory import peak_gib, start_of_peak
from training.shapes import QWEN3, TINY, write_random_model

from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import PackedBatch
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.cluster.ports import free_port
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.inference.server import ServerSettings, running
from telescope_train.inference.sleep import SLEEP_PATH, WAKE_PATH
from telescope_train.trainer.worker import TrainerWorker

SHAPE, SEQ_LEN = (QWEN3[0], 8192) if ON_GPU else (TINY, 256)
LEAST_PACKING = 1.3
"""Times that packed rows are faster than padded ones (G2). Samples have a third of the longest
length in the mean, so that about 3 is what there is to win."""
LEAST_SAVED_BYTES = 6.0
"""For each parameter that the optimizer's two moments leave on the GPU (G7); they have 8."""
MOST_OFFLOAD_S = 4.0
"""Added to a step for each billion parameters (G7): 12 bytes through PCIe at 8 GB/s, and AdamW over
28 bytes in CPU memory at 12 GB/s."""
MOST_CHANGED = 0.25
"""Of the bytes of bfloat16 weights, after a step at a rate of 1e-6 (G8): what sending differences
alone would have to save."""
LEAST_FREED = 0.8
"""Of the memory that a server held, after it sleeps (G6)."""
MOST_SLEEP_S = 10.0
"""Seconds to sleep, and to wake (G6)."""


@contextmanager
def rank(model: Path, **trainer: Any) -> Iterator[TrainerWorker]:
    """Have one trainer rank, which is gone with its memory after the block."""
    settings = BackendSettings(
        model=ModelSection(model=str(model)),
        trainer=TrainerSection(seq_len=SEQ_LEN, **trainer),
        algorithm=AlgorithmSection(),
        seed=0,
        number_of_steps=10,
    )
    worker = TrainerWorker(settings)
    try:
        yield worker
    finally:
        worker.close()
        del worker
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def random_model() -> Iterator[Path]:
    """Have a folder with random weights."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        write_random_model(SHAPE, Path(folder) / "model", DEVICE)
        yield Path(folder) / "model"


def seconds_of_step(worker: TrainerWorker, batches: list[PackedBatch]) -> float:
    """Return the median of three steps after one of warm-up."""
    seconds = []
    for step in range(4):
        started_s = time.perf_counter()
        worker.train_step(batches, version=step)
        synchronise()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:])


def padded(lengths: list[int]) -> list[PackedBatch]:
    """Return a row for each sample; the rank pads all of them to the longest."""
    import numpy as np

    rng = np.random.default_rng(0)
    samples = [make_sample(rng, number, length, SHAPE) for number, length in enumerate(lengths)]
    weights_N = token_weights(samples, "token", max_tokens=SEQ_LEN)
    return [
        pack([one], weights_N[number : number + 1], seq_len=SEQ_LEN, num_ranks=1)[0][0]
        for number, one in enumerate(samples)
    ]


def packing() -> Found:
    """Compare steps over packed rows with steps over padded ones, of the same samples."""
    batches, lengths = make_batches(SHAPE, SEQ_LEN)
    with random_model() as model:
        with rank(model) as worker:
            packed_s = seconds_of_step(worker, batches)
        with rank(model, pad_to_multiple_of=max(lengths)) as worker:
            padded_s = seconds_of_step(worker, padded(lengths))
    return judged_packing(padded_s / packed_s, mean=sum(lengths) / len(lengths) / max(lengths))


def judged_packing(times: float, *, mean: float) -> Found:
    """Return whether packing keeps its limit; `mean`: length over the longest."""
    text = f"{times:.1f} times as fast, mean length {mean:.0%} of the longest"
    return Found(text=text, is_met=times >= LEAST_PACKING)


def changed_bytes() -> Found:
    """Return how many bytes of the weights that are sent a step at a rate of 1e-6 changes."""
    batches, _ = make_batches(SHAPE, SEQ_LEN)
    with random_model() as model, rank(model, learning_rate=1e-6, warmup_steps=0) as worker:
        before = dict(as_sent(worker))
        worker.train_step(batches, version=0)
        changed = total = 0
        for name, value in as_sent(worker):
            changed += int((value != before.pop(name)).sum())
            total += value.numel()
    return judged_changes(changed / total)


def as_sent(worker: TrainerWorker) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bytes of each tensor in bfloat16, on the CPU."""
    for name, value in worker.export_weights():
        yield name, value.to(torch.bfloat16).contiguous().view(torch.uint8).clone()


def judged_changes(share: float) -> Found:
    """Return whether a share of changed bytes is within its limit; none is a step that was not."""
    return Found(text=f"{share:.2%} of the bytes change", is_met=0 < share <= MOST_CHANGED)


def offload() -> Found:
    """Compare steps whose optimizer is in CPU memory with steps whose optimizer is on the GPU."""
    batches, _ = make_batches(SHAPE, SEQ_LEN)
    seconds: list[float] = []
    peaks_gib: list[float] = []
    with random_model() as model:
        for is_offloaded in (False, True):
            start_of_peak()
            with rank(model, optimizer_cpu_offload=is_offloaded) as worker:
                seconds.append(seconds_of_step(worker, batches))
                number = sum(one.numel() for one in worker.backend._policy.parameters())  # pyright: ignore
                peaks_gib.append(peak_gib())
    return judged_offload(seconds, peaks_gib, number)


def judged_offload(seconds: list[float], peaks_gib: list[float], number: int) -> Found:
    """Return whether offloading `number` parameters saves memory for little enough time."""
    saved = (peaks_gib[0] - peaks_gib[1]) * 2**30 / number
    added_s = seconds[1] - seconds[0]
    text = f"{saved:.1f} bytes less a parameter, {added_s:.2f} s more a step of {BATCHES} batches"
    is_met = saved >= LEAST_SAVED_BYTES and added_s <= MOST_OFFLOAD_S * number / 1e9
    return Found(text=text, is_met=is_met)


def sleep_and_wake() -> Found:
    """Let a server sleep and wake; what it gives back, and how fast."""
    with random_model() as model, tempfile.TemporaryDirectory() as folder:
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        settings = ServerSettings(
            model_path=str(model),
            port=free_port(),
            log_path=Path(folder) / "server.log",
            device="cuda",
            dtype="bfloat16",
            max_model_len=2048,
            gpu_memory_utilization=0.5,
            sleeps=True,
            takes_weights=True,
        )
        free_before, _ = torch.cuda.mem_get_info()
        with running(settings):
            held = free_before - torch.cuda.mem_get_info()[0]
            sleep_s = seconds_of_call(f"{settings.base_url}{SLEEP_PATH}?level=1&mode=wait")
            left = free_before - torch.cuda.mem_get_info()[0]
            wake_s = seconds_of_call(f"{settings.base_url}{WAKE_PATH}")
    return judged_sleep(1 - left / held, sleep_s, wake_s, size)


def seconds_of_call(url: str) -> float:
    """Return how long the server takes to obey."""
    started_s = time.perf_counter()
    urlopen(Request(url, data=b"{}", method="POST"), timeout=120).close()
    return time.perf_counter() - started_s


def judged_sleep(freed: float, sleep_s: float, wake_s: float, num_bytes: int) -> Found:
    """Return whether a server gave enough back, and soon; `num_bytes`: of its weights."""
    speeds = [num_bytes / seconds / 1e9 for seconds in (sleep_s, wake_s)]
    text = (
        f"{freed:.0%} given back in {sleep_s:.2f} s ({speeds[0]:.1f} GB/s of weights), "
        f"taken in {wake_s:.2f} s ({speeds[1]:.1f} GB/s)"
    )
    return Found(text=text, is_met=freed >= LEAST_FREED and max(sleep_s, wake_s) <= MOST_SLEEP_S)


def parts() -> Iterator[Part]:
    """Yield one part for each measure."""
    yield Part(
        name=f"{SHAPE.name}: packed against padded rows (G2)",
        limit=f"at least {LEAST_PACKING:g} times as fast",
        run=packing,
        seconds=240,
    )
    yield Part(
        name=f"{QWEN3[0].name}: sleep at level 1 and wake (G6)",
        limit=f"at least {LEAST_FREED:.0%} given back, {MOST_SLEEP_S:g} s each",
        run=sleep_and_wake,
        num_gpus=1,
        seconds=300,
    )
    yield Part(
        name=f"{QWEN3[0].name}: optimizer in CPU memory (G7)",
        limit=(
            f"at least {LEAST_SAVED_BYTES:g} bytes less a parameter, at most {MOST_OFFLOAD_S:g} s "
            "more a billion parameters"
        ),
        run=offload,
        num_gpus=1,
        seconds=240,
    )
    yield Part(
        name=f"{SHAPE.name}: bytes of weights that a step changes (G8)",
        limit=f"some, and at most {MOST_CHANGED:.0%}, at a rate of 1e-6",
        run=changed_bytes,
        seconds=180,
    )
