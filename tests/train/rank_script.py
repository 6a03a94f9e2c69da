"""Trainer ranks of several jobs; they write what the tests compare.

usage: rank_script.py JOB_FILE (JSON: list of jobs with model, output, world_size and port; optional
seq_len, dtype, steps, trainer settings, whether samples are routed, whether it saves, a checkpoint
to load, and the rank whose advantages are not finite in a last step). Ranks are forked once for
each number of ranks, and take its jobs one after the other: what a process does only once (imports,
torch's first forward and backward) is not done for each job.
"""

import gc
import json
import multiprocessing
import sys
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from backend_cases import backend_settings, grpo_batches
from routed_cases import routed_batches
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import AutoConfig

from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.backends.fsdp.policy import load_policy, load_reference
from telescope_train.backends.fsdp.sharding import local_part
from telescope_train.backends.progress import checksums
from telescope_train.models.load import prepare_model
from telescope_train.trainer.worker import Meeting, TrainerWorker, keep_freed_memory

CPU = torch.device("cpu")
FORK = multiprocessing.get_context("fork")
FACTS = ("logprobs_M", "entropy_M", "effective_advantages_M")


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    prepare({job["model"] for job in jobs if not job.get("only_loads")})
    groups: dict[tuple[int, bool], list[dict]] = {}
    for job in jobs:
        groups.setdefault((job["world_size"], "only_loads" in job), []).append(job)
    # The largest first, since jobs load what those of more ranks have saved.
    for (world_size, _), chosen in sorted(groups.items(), key=lambda one: one[0], reverse=True):
        ranks = [FORK.Process(target=run_all, args=(rank, chosen)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        waiting = {rank.sentinel: rank for rank in ranks}
        while waiting:
            for sentinel in wait(list(waiting)):
                ended = waiting.pop(sentinel)
                ended.join()
                if ended.exitcode:
                    for other in waiting.values():
                        other.kill()
                    sys.exit(f"rank {ranks.index(ended)} of {world_size} failed")


def run_all(rank: int, jobs: list[dict]) -> None:
    for job in jobs:
        print(f"rank {rank}: {job['output']}", flush=True)
        (load_only if "only_loads" in job else run)(rank, job)
        # Whose entries name the groups of processes that the job has closed.
        _clear_sharding_prop_cache()


def prepare(models: set[str]) -> None:
    """Do once what each rank would do again: what transformers keeps of a model is inherited."""
    for model in models:
        prepare_model(model)
    gc.collect()
    gc.freeze()


def run(rank: int, job: dict) -> None:
    output, world_size = Path(job["output"]), job["world_size"]
    settings = backend_settings(
        job["model"], dtype=job.get("dtype", "float64"), records=True, **job.get("trainer", {})
    )
    layout = fsdp_layout(settings.trainer, world_size)
    worker = TrainerWorker(
        settings, meeting=Meeting(rank=rank, world_size=world_size, port=job["port"])
    )
    if "load" in job:
        worker.load_checkpoint(job["load"])
    sizes = {"seq_len": job.get("seq_len", 64), "num_ranks": layout.num_shards}
    if job.get("routed"):
        shards = routed_batches(AutoConfig.from_pretrained(job["model"]), **sizes)
    else:
        shards = grpo_batches(**sizes)
    batches = shards[layout.shard_of(rank)]
    logprobs = worker.logprobs(batches)
    result = worker.backend.accumulate_gradient(batches, version=0)
    columns = [[getattr(one, name) for name in FACTS] for one in result.token_facts]
    for number, one in enumerate(columns):
        np.savez(output / f"facts-{rank}-{number}.npz", *one)
    gradient = {name: array(value) for name, value in worker.backend.export_gradient()}
    update = worker.backend.apply_gradient()
    weights = exported(worker)
    if job.get("saves"):
        worker.save_checkpoint(output / "checkpoint")
        worker.save_pretrained(output / "exported")
    for _ in range(job.get("steps", 1) - 1):
        worker.backend.accumulate_gradient(batches, version=0)
        worker.backend.apply_gradient()
    last = exported(worker)
    broken = None
    if "broken_rank" in job:
        if job["broken_rank"] == rank:
            batches = [replace(b, advantages_T=b.advantages_T * np.nan) for b in batches]
        worker.backend.accumulate_gradient(batches, version=0)
        broken = worker.backend.apply_gradient()
        assert all(np.array_equal(value, last[name]) for name, value in exported(worker).items())
    if rank == 0:
        np.savez(output / "gradient.npz", **gradient)
        np.savez(output / "weights.npz", **weights)
        np.savez(output / "logprobs.npz", *logprobs)
        np.savez(output / "last.npz", **last)
        numbers = {
            "loss": result.loss,
            "norm": update.gradient_norm,
            "broken": None if broken is None else [broken.is_skipped, broken.gradient_norm],
            # In float64 these differ by rounding alone; the head is compared in float32.
            "packing_difference": max(
                test.value for test in worker.self_tests if not test.name.startswith("output head")
            ),
            "entropy": result.metrics["entropy"].mean,
            "count": result.metrics["entropy"].count,
        }
        (output / "numbers.json").write_text(json.dumps(numbers))
    (output / f"kept-{rank}.json").write_text(json.dumps(kept(worker)))
    worker.close()


def load_only(rank: int, job: dict) -> None:
    """Load the policy and a reference model; writes the bytes of memory that each one took."""
    output, world_size = Path(job["output"]), job["world_size"]
    settings = backend_settings(job["model"], dtype="float32")
    store = dist.FileStore(str(output / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    keep_freed_memory()  # so that what was taken for a moment shows at the end
    before = anonymous_bytes()
    policy = load_policy(settings, CPU, fsdp_layout(settings.trainer, world_size))
    between = anonymous_bytes()
    reference = load_reference(settings, CPU, policy)
    after = anonymous_bytes()
    local = [local_part(value) for value in policy.policy.parameters()]
    facts = {
        "policy": between - before,
        "reference": after - between,
        "shard": sum(one.nbytes for one in local),
        "largest": max(one.nbytes for one in policy.policy.parameters()),
        "layers": reference.lm.config.num_hidden_layers,
    }
    (output / f"loaded-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: pages of a mapped file can be dropped."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux says it")


def exported(worker: TrainerWorker) -> dict[str, np.ndarray]:
    return {name: array(value) for name, value in worker.export_weights()}


def array(value: torch.Tensor) -> np.ndarray:
    """Return a copy of `value`, as float32 where numpy has no such type."""
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()


def kept(worker: TrainerWorker) -> dict:
    """Numbers that this rank keeps: of weights, of the optimizer's moments, and of their bits."""
    policy, optimizer = worker.backend._policy, worker.backend._optimizer
    moments = [
        value for state in optimizer.state.values() for value in state.values() if value.ndim
    ]
    return {
        "weights": sum(local_part(value).numel() for value in policy.parameters()),
        "moments": sum(local_part(value).numel() for value in moments),
        "bits": checksums(local_part(value) for value in [*policy.parameters(), *moments]),
    }


if __name__ == "__main__":
    main()
