"""Steps of training as a run does them: tokens/s and MFU, memory beside the plan, and a profile.

Without a GPU the same code runs on a shape that is too small for its figures to mean anything.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_training import (
    DEVICE,
    ON_GPU,
    Case,
    make_batches,
    measure,
    measure_logprobs,
    synchronise,
)
from gpu_parts.part import Found, Part
from gpu_parts.speeds import SEQ_LEN, SHAPE, random_model, rank
from torch.profiler import ProfilerActivity, profile
from training.shapes import QWEN3, TINY, write_random_model

from telescope_train.config.schema import TrainConfig
from telescope_train.models.facts import read_model_facts
from telescope_train.plan.memory import rank_memory

LEAST_MFU = 0.25
"""Of each row (G1)."""
MOST_LOGPROBS_GIB = 1.5
"""Of the log-probs of 32,768 tokens, forward and backward (G3)."""
LEAST_PRODUCTS = 0.6
"""Share of a GPU's own time in a step that is matrix products and attention."""
MOST_OF_PLAN = 1.1
"""Times the planned memory: a plan that promises less than is used ends in a run out of memory."""
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "addmm", "bmm"),
    "our kernels": ("_rms_norm", "_rotate_kernel", "_gate_", "_fold_kernel", "_logits_gradient"),
    "optimizer": ("multi_tensor", "adam"),
    "copies": ("memcpy", "memset", "copy", "cat", "fill"),
}
"""Kinds of kernels by what their names hold, the first that fits; the rest are none of these."""


def cases() -> list[Case]:
    """Return what is trained: a shape, tokens of a row, what is recomputed, not compiled."""
    if not ON_GPU:
        return [Case(TINY, 256, False, False)]
    return [
        Case(QWEN3[0], 8192, False, False),
        Case(QWEN3[0], 32_768, True, False),
        Case(QWEN3[1], 8192, True, False),
    ]


def planned_gib(case: Case, model: Path) -> float | None:
    """Return what the memory plan of a run says that a rank needs on a GPU."""
    config = TrainConfig.model_validate(
        {
            "run": {"name": "check", "number_of_steps": 1},
            "model": {"model": str(model)},
            "environments": [{"name": "lengths"}],
            "trainer": {
                "seq_len": case.seq_len,
                "gradient_checkpointing": case.gradient_checkpointing,
            },
        }
    )
    plan = rank_memory(config, read_model_facts(str(model)), device="cuda")
    return None if plan is None else plan.total_bytes / 2**30


def steps(case: Case) -> Found:
    """Time steps of one case."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = Path(folder) / "model"
        write_random_model(case.shape, model, DEVICE)
        return judged(measure(case, model), planned_gib(case, model))


def judged(row: Mapping[str, Any], planned: float | None) -> Found:
    """Return whether a row of bench_training.py keeps G1, and the memory that was planned."""
    if "problem" in row:
        return Found(text=row["problem"], is_met=False)
    used = row["peak_gib"]
    of_plan = "not planned" if planned is None else f"{planned:.1f} planned"
    text = f"{row['tokens_per_s']:,.0f} tokens/s, {used:.1f} GiB, {of_plan}"
    if row["mfu"] is None:
        return Found(text=f"MFU unknown, {text}", is_met=None)
    fits = planned is None or used <= MOST_OF_PLAN * planned
    return Found(
        text=f"MFU {row['mfu']:.1%}, {text}", is_met=bool(row["mfu"] >= LEAST_MFU and fits)
    )


def logprobs() -> Found:
    """Measure the memory of the log-probs of one long batch."""
    row = measure_logprobs()
    text = f"{row['peak_gib']:.2f} GiB, {row['seconds']:.3f} s, {row['num_tokens']:,} tokens"
    return Found(text=text, is_met=row["peak_gib"] <= MOST_LOGPROBS_GIB if ON_GPU else None)


def profiled() -> Found:
    """Profile one step after two of warm-up."""
    activity = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU
    batches, _ = make_batches(SHAPE, SEQ_LEN)
    with random_model() as model, rank(model, gradient_checkpointing=False) as worker:
        for version in range(2):
            worker.train_step(batches, version=version)
        synchronise()
        with profile(activities=[activity]) as found:
            worker.train_step(batches, version=2)
            synchronise()
    # Operations of the CPU hold the time of their kernels, too; with CUDA alone there are none.
    own = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    return judged_profile((one.key, getattr(one, own)) for one in found.key_averages())


def judged_profile(kernels: Iterable[tuple[str, float]]) -> Found:
    """Return what kinds of kernels took the time, given name and time of each."""
    times = dict.fromkeys([*KINDS, "rest"], 0.0)
    for name, time in kernels:
        low = name.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(p in low for p in parts)), "rest")
        times[kind] += time
    total = sum(times.values())
    if not total:
        return Found(text="the profiler saw no kernel", is_met=False)
    text = ", ".join(f"{kind} {time / total:.0%}" for kind, time in times.items())
    most = (times["products"] + times["attention"]) / total
    return Found(text=text, is_met=most >= LEAST_PRODUCTS if ON_GPU else None)


def parts() -> Iterator[Part]:
    """Yield one part for each case, then the log-probs alone and the profile."""
    for case in cases():
        yield Part(
            name=f"{case.shape.name}, rows of {case.seq_len:,} tokens"
            + (", all recomputed" if case.gradient_checkpointing else ""),
            limit=f"MFU at least {LEAST_MFU:.0%} (G1), at most {MOST_OF_PLAN:g} times the planned "
            "memory",
            run=lambda case=case: steps(case),
        )
    yield Part(
        name="memory of log-probs (G3)", limit=f"at most {MOST_LOGPROBS_GIB:g} GiB", run=logprobs
    )
    yield Part(
        name=f"{SHAPE.name}: where the time of a step goes",
        limit=f"products and attention at least {LEAST_PRODUCTS:.0%}",
        run=profiled,
    )
