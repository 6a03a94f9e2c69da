"""Trainer ranks as processes that take one layout of Megatron after another.

usage: megatron_script.py RANK WORLD_SIZE PORT JOB_FILE (JSON: output; cases: name, model, section;
optional dtype, load, save, supervised, shares, reference, teacher)
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from backend_cases import VOCAB, grpo_batches
from megatron_cases import NUM_STEPS, megatron_settings
from prefix_trees import all_shared, plain_batches, random_tree

from telescope_train.algorithms import loss_function
from telescope_train.algorithms.policy_gradient import negative_log_likelihood
from telescope_train.backends.megatron.backend import MegatronBackend
from telescope_train.config.schema import AlgorithmSection


def main() -> None:
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for case in job["cases"]:
        started_s = time.monotonic()
        run(case, Path(job["output"]), rank, world_size)
        if rank == 0:
            print(case["name"], f"{time.monotonic() - started_s:.1f} s", flush=True)
    dist.destroy_process_group()


def settings_of(case):
    """Return the settings of a case, and its loss."""
    settings = megatron_settings(case["model"], case["section"], dtype=case.get("dtype", "float64"))
    if case.get("supervised"):
        return replace(settings, algorithm=None), negative_log_likelihood
    if case.get("reference"):
        settings = replace(settings, algorithm=AlgorithmSection(kl_penalty_tau=0.1))
    if teacher := case.get("teacher"):
        section = AlgorithmSection(algorithm="opd", reference_model=teacher)
        settings = replace(settings, algorithm=section)
    return settings, loss_function(settings.algorithm)


def run(case, output: Path, rank: int, world_size: int) -> None:
    settings, loss = settings_of(case)
    backend = MegatronBackend(settings, loss, torch.device("cpu"))
    layout = MegatronBackend.rank_layout(settings, world_size)
    if case.get("shares"):
        found = with_and_without(backend, layout.data, layout.shard_of(rank))
        np.savez(output / f"{case['name']}-{rank}.npz", **found)
        return
    if case.get("reference"):
        batches = grpo_batches(seq_len=64, num_ranks=layout.data)[layout.shard_of(rank)]
        np.savez(output / f"{case['name']}-{rank}.npz", **moved_reference(backend, batches, case))
        dist.barrier()
        return
    if case.get("teacher"):
        batches = grpo_batches(seq_len=64, num_ranks=layout.data)[layout.shard_of(rank)]
        here = backend.reference_logprobs(batches)
        there = backend.reference_logprobs(batches, by_transformers=True)
        found = {f"logprobs.{i}": value for i, value in enumerate(here)}
        found |= {f"transformers.{i}": value for i, value in enumerate(there)}
        np.savez(output / f"{case['name']}-{rank}.npz", **found)
        dist.barrier()
        return
    found = {}
    if "load" in case:
        backend.load_checkpoint(case["load"])
        found |= {f"loaded.{n}": v.numpy().copy() for n, v in backend.export_weights()}
    batches = grpo_batches(seq_len=64, num_ranks=layout.data)[layout.shard_of(rank)]
    found |= {f"logprobs.{i}": v for i, v in enumerate(backend.logprobs(batches))}
    norms = []
    for step in range(case.get("steps", NUM_STEPS)):
        for part in parts(batches, case.get("streamed", False)):
            result = backend.accumulate_gradient(part, version=0)
            found[f"count.{step}"] = np.array(result.metrics["entropy"].count)
        if step == 0 and "load" not in case:
            found |= {f"gradient.{n}": v.numpy().copy() for n, v in backend.export_gradient()}
        norms.append(backend.apply_gradient().gradient_norm)
    found |= {f"weight.{n}": v.numpy().copy() for n, v in backend.export_weights()}
    found["norms"] = np.array(norms)
    whole = sum(v.size for n, v in found.items() if n.startswith("weight."))
    found["state"] = np.array([backend.num_state_values(), whole])
    if "save" in case:
        backend.save_checkpoint(case["save"])
    if "export" in case:
        backend.save_pretrained(case["export"])
    np.savez(output / f"{case['name']}-{rank}.npz", **found)
    dist.barrier()


def moved_reference(backend, batches, case) -> dict[str, np.ndarray]:
    """Load a checkpoint whose reference was updated, or take a step, update it and save one."""
    found = {"first": backend.reference_logprobs(batches)[0]}
    if "load" in case:
        backend.load_checkpoint(case["load"])
    else:
        known = backend.reference_logprobs(batches)
        pairs = zip(batches, known, strict=True)
        told = [replace(batch, reference_logprobs_T=one) for batch, one in pairs]
        backend.accumulate_gradient(told, version=0)
        backend.apply_gradient()
        backend.update_reference()
        backend.save_checkpoint(case["save"])
    return {**found, "moved": backend.reference_logprobs(batches)[0]}


def with_and_without(backend, num_shards, shard) -> dict[str, np.ndarray]:
    """Return gradients and log-probs of samples that begin alike, sharing that or not."""
    if backend.sharing.reason:
        return {"reason": np.array(backend.sharing.reason)}
    samples = random_tree(np.random.default_rng(5), num=16, vocab=VOCAB)
    apart = plain_batches(samples, num_batches=2, num_ranks=num_shards)
    together = all_shared(apart)
    found = {"saved": np.array(sum(one.num_shared_tokens for part in together for one in part))}
    for name, shards in (("apart", apart), ("together", together)):
        backend._stepper.clear()
        logprobs = backend.logprobs(shards[shard])
        backend.accumulate_gradient(shards[shard], version=0)
        found |= {f"{name}.{n}": v.numpy().copy() for n, v in backend.export_gradient()}
        found |= {f"logprobs of {name} {n}": v for n, v in enumerate(logprobs)}
    return found


def parts(batches, streamed):
    """Return the batches at once, or the first and the others."""
    return [batches[:1], batches[1:]] if streamed and len(batches) > 1 else [batches]


if __name__ == "__main__":
    main()
