"""Packed training of models with random weights: tokens/s, MFU and peak memory on this machine.

On a GPU it trains Qwen3 shapes of 0.6B, 1.7B and 4B at 8k and 32k tokens; without one a tiny shape,
which shows that the script works and nothing else. Weights are random and nothing is downloaded.
Run: python benchmarks/bench_training.py [--shape "Qwen3 0.6B"] [--results FOLDER]
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import RESULTS, facts_of_run, table, write_results
from training.memory import peak_gib, start_of_peak
from training.shapes import QWEN3, TINY, Shape, sample_lengths, write_random_model

from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import PackedBatch, TrainingSample
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.models.logprobs import chunked_logprobs
from telescope_train.step.throughput import peak_flops
from telescope_train.trainer.worker import TrainerWorker

COMMAND = "python benchmarks/bench_training.py"
WARM_UP, STEPS, BATCHES = 2, 3, 4
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NOTE = f"""\
# Packed training on one device

{{status}}

One rank of the trainer as a run starts it: the same backend, attention, packing and GRPO loss. A
step is {BATCHES} packed batches forward and backward and one AdamW step; the median of {STEPS}
steps after {WARM_UP} of warm-up. Samples are of lognormal length, a fifth of a batch in the median.
Master weights and moments are float32, layers compute in bfloat16 on a GPU and float32 on a CPU.
MFU is FLOPs over time and the card's dense bfloat16 peak, where FLOPs are 6 per parameter of a
matrix (the head included) and token, plus 6 L^2 times the width of all heads per layer for the
causal attention of a sample of L tokens. What checkpointing and the log-probs compute twice is not
counted. Peak memory is what tensors held at most; on a CPU, the process.

{{facts}}
"""
OWED = """\
**No GPU was at hand: this is the same script on a CPU, with a shape too small to mean anything. The
figures of Qwen3 0.6B, 1.7B and 4B on a GPU, and whether the log-probs of 32,768 tokens stay under
1.5 GB there, are owed.**"""


class Case(NamedTuple):
    """One way to train one shape."""

    shape: Shape
    seq_len: int
    gradient_checkpointing: bool
    compile: bool


def cases(only: str | None) -> Iterator[Case]:
    """Yield what is measured: on a CPU one tiny shape, not compiled."""
    shapes, seq_lens, compiled = (QWEN3, (8192, 32_768), (False, True))
    if not ON_GPU:
        shapes, seq_lens, compiled = ((TINY,), (256,), (False,))
    for shape, *rest in product(shapes, seq_lens, (True, False), compiled):
        if only in (None, shape.name):
            yield Case(shape, *rest)


def make_batches(shape: Shape, seq_len: int) -> tuple[list[PackedBatch], list[int]]:
    """Return full batches, and the lengths of the samples in them."""
    rng = np.random.default_rng(0)
    lengths = sample_lengths(rng, seq_len, BATCHES)
    samples = [make_sample(rng, number, length, shape) for number, length in enumerate(lengths)]
    weights_N = token_weights(samples, "token", max_tokens=seq_len)
    return pack(samples, weights_N, seq_len=seq_len, num_ranks=1)[0], lengths


def make_sample(rng: np.random.Generator, number: int, length: int, shape: Shape) -> TrainingSample:
    mask = np.arange(length) >= min(8, length // 4)
    return TrainingSample(
        token_ids=rng.integers(shape.vocab, size=length, dtype=np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -np.log(shape.vocab), np.nan).astype(np.float32),
        advantage=float(rng.standard_normal()),
        temperature=1.0,
        oldest_version=0,
        newest_version=0,
        group_id=str(number),
        rollout_index=0,
        environment="bench",
    )


def measure(case: Case, model: Path) -> dict[str, Any]:
    """Train a few steps; returns speed and memory, or what went wrong."""
    row: dict[str, Any] = {**case._asdict(), "shape": case.shape.name}
    compiled = {"compile": True} if case.compile else {}
    settings = BackendSettings(
        model=ModelSection(model=str(model)),
        trainer=TrainerSection(
            seq_len=case.seq_len, gradient_checkpointing=case.gradient_checkpointing, **compiled
        ),
        algorithm=AlgorithmSection(),
        seed=0,
        number_of_steps=WARM_UP + STEPS,
    )
    start_of_peak()
    try:
        worker = TrainerWorker(settings)
    except torch.OutOfMemoryError:
        return row | {"problem": "out of memory"}
    try:
        return row | timed_steps(worker, case)
    except torch.OutOfMemoryError:
        return row | {"problem": "out of memory"}
    finally:
        worker.close()
        del worker
        gc.collect()
        torch.cuda.empty_cache()


def timed_steps(worker: TrainerWorker, case: Case) -> dict[str, float]:
    batches, lengths = make_batches(case.shape, case.seq_len)
    seconds = []
    for step in range(WARM_UP + STEPS):
        started = time.perf_counter()
        worker.train_step(batches, version=step)
        synchronise()
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds[WARM_UP:])
    peak = peak_flops(torch.cuda.get_device_name()) if ON_GPU else None
    flops = case.shape.training_flops(lengths) / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": sum(lengths) / step_s,
        "tflops_per_s": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "peak_gib": peak_gib(),
        "fill": sum(lengths) / (len(batches) * case.seq_len),
    }


def measure_logprobs() -> dict[str, Any]:
    """Return time and memory of the log-probs of one long batch, forward and backward."""
    num_tokens, vocab, hidden = (32_768, 151_936, 1024) if ON_GPU else (256, 512, 64)
    kind = {"device": DEVICE, "dtype": torch.bfloat16 if ON_GPU else torch.float32}
    torch.manual_seed(0)
    hidden_TH = torch.randn(num_tokens, hidden, **kind).requires_grad_()
    weight_VH = (torch.randn(vocab, hidden, **kind) * 0.02).requires_grad_()
    targets_T = torch.randint(vocab, (num_tokens,), device=DEVICE)
    temperatures_T = torch.ones(num_tokens, device=DEVICE)
    seconds = []
    for _ in range(3):
        hidden_TH.grad = weight_VH.grad = None
        synchronise()
        before_gib, started = start_of_peak(), time.perf_counter()
        found = chunked_logprobs(hidden_TH, weight_VH, targets_T, temperatures_T, chunk_size=1024)
        found.logprobs_T.sum().backward()
        synchronise()
        seconds.append(time.perf_counter() - started)
    return {
        "num_tokens": num_tokens,
        "vocab": vocab,
        "hidden": hidden,
        "seconds": min(seconds),
        "peak_gib": peak_gib() - before_gib,
    }


def synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


HEAD = (
    *("model", "tokens of a batch", "checkpointing", "compiled", "tokens/s", "MFU"),
    *("TFLOP/s", "peak, GiB", "fill"),
)


def as_cells(row: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    said = [row["shape"], f"{row['seq_len']:,}"]
    said += ["yes" if row[key] else "no" for key in ("gradient_checkpointing", "compile")]
    if "problem" in row:
        return [*said, row["problem"], *["-"] * 4]
    return [
        *(*said, f"{row['tokens_per_s']:,.0f}"),
        "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
        *(f"{row['tflops_per_s']:.3g}", f"{row['peak_gib']:.2f}", f"{row['fill']:.3f}"),
    ]


def logprobs_line(row: dict[str, Any]) -> str:
    """Return the sentence about the log-probs alone."""
    shape = f"T = {row['num_tokens']:,}, V = {row['vocab']:,}, H = {row['hidden']:,}"
    return (
        f"Log-probs alone, forward and backward, {shape}: {1024 * row['peak_gib']:,.1f} MiB beyond "
        f"the inputs, gradients included, in {row['seconds']:.3f} s."
    )


def measure_all(only: str | None) -> list[dict[str, Any]]:
    """Return one row per case; each shape is written once to a folder that goes again."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-training-") as name:
        for case in cases(only):
            model = Path(name) / case.shape.name.replace(" ", "-")
            if not model.exists():
                write_random_model(case.shape, model, DEVICE)
            rows.append(measure(case, model))
            print(" | ".join(as_cells(rows[-1])), flush=True)
    return rows


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", help="only this one, by its name")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = facts_of_run(COMMAND, "torch", "transformers")
    status = f"Measured on {torch.cuda.get_device_name()}." if ON_GPU else OWED
    print(status)
    rows = measure_all(arguments.shape)
    logprobs = measure_logprobs()
    line = logprobs_line(logprobs)
    print(line)
    page = "\n".join([NOTE, table(HEAD, [as_cells(row) for row in rows]), "", line])
    page = page.replace("{status}", status)
    write_results("training", page, facts, [*rows, logprobs], folder=arguments.results)


if __name__ == "__main__":
    main()
