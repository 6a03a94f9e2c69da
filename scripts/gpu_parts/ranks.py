"""The gradient of FSDP and Megatron, on two ranks where there are two GPUs, against float64.

The reference is one sample at a time through transformers' own model in float64. Gradients are
compared, never losses: a missing reduction leaves a loss as it was, and gives 0.9 here.
"""

import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backend_cases import (
    backend_settings,
    grpo_batches,
    relative_difference,
    slow_gradient,
)
from gpu_parts.part import Found, Part, left_out, within

from telescope_train.backends import load_backend
from telescope_train.cluster.ports import free_port
from telescope_train.config.trainer_section import MegatronSection
from telescope_train.models.tiny import make_tiny_model
from telescope_train.trainer.worker import Meeting, TrainerWorker

MOST = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest relative difference of the gradient, by the dtype that layers compute in."""


def rank_gradient(rank: int, job: dict[str, Any], answers: Any) -> None:
    """Be one rank, in a process of its own; rank 0 answers with the gradient."""
    settings = backend_settings(job["model"], dtype="float32", **job["trainer"])
    model = settings.model.model_copy(update={"mixed_precision_dtype": job["dtype"]})
    settings = replace(settings, model=model, megatron=MegatronSection(**job["megatron"]))
    layout = load_backend(settings.trainer.train_backend).rank_layout(settings, job["ranks"])
    meeting = Meeting(rank=rank, world_size=job["ranks"], port=job["port"])
    worker = TrainerWorker(settings, meeting=meeting)
    batches = grpo_batches(seq_len=64, num_ranks=layout.num_shards)[layout.shard_of(rank)]
    worker.backend.accumulate_gradient(batches, version=0)
    named = worker.backend.export_gradient()
    gradient = {name: value.detach().double().cpu().numpy() for name, value in named}
    if rank == 0:
        answers.put(gradient)  # a process that ends waits until this was read
    worker.backend.apply_gradient()  # collective, so no rank leaves before the others
    worker.close()


def gradient_on(num_ranks: int, job: dict[str, Any], wait_s: float) -> dict[str, np.ndarray]:
    """Return the gradient of `num_ranks` ranks; all of them are gone after it."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    job = {**job, "ranks": num_ranks, "port": free_port()}
    ranks = [
        context.Process(target=rank_gradient, args=(rank, job, answers))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = answers.get(timeout=wait_s)
        for rank in ranks:
            rank.join(30)
    finally:
        for rank in ranks:
            rank.kill()
    return found


def check(backend: str, num_ranks: int, dtype: str, megatron: dict[str, int]) -> Found:
    """Compare the gradient of a backend with the reference."""
    if backend == "megatron" and find_spec("megatron") is None:
        return left_out("megatron-core is not installed; it is the extra telescope-train[megatron]")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", seed=0)
        job = {
            "model": str(model),
            "dtype": dtype,
            "trainer": {"train_backend": backend},
            "megatron": megatron,
        }
        found = gradient_on(num_ranks, job, wait_s=100)
        worst = relative_difference(found, slow_gradient(model))
    where = "cuda" if torch.cuda.is_available() else "cpu"
    return within(f"{worst:.1e} on {num_ranks} ranks, {where}", worst, MOST[dtype])


def parts(num_gpus: int) -> Iterator[Part]:
    """Yield the parts that two ranks run, or one where there is one GPU."""
    num_ranks = 1 if num_gpus == 1 else 2
    tensor = {"megatron_tensor_parallel_size": num_ranks}
    for dtype in MOST if num_gpus else ("float32",):
        for backend, section in (("fsdp", {}), ("megatron", tensor)):

            def run(
                backend: str = backend, dtype: str = dtype, section: dict[str, int] = section
            ) -> Found:
                return check(backend, num_ranks, dtype, section)

            yield Part(
                name=f"gradient of {backend}, {num_ranks} ranks, {dtype}",
                limit=f"{MOST[dtype]:g} from float64",
                run=run,
                seconds=180,
            )
