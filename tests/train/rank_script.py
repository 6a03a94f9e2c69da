"""One trainer rank as a process: takes a gradient, writes what the tests compare.

usage: rank_script.py RANK WORLD_SIZE PORT JOB_FILE (JSON: model, seq_len, output; optional trainer
settings, and the rank whose advantages are not finite)
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from backend_cases import VOCAB, backend_settings, grpo_batches

from telescope_train.diagnostics.rank_checks import Tolerance, check_packing
from telescope_train.trainer.worker import Meeting, TrainerWorker

FACTS = ("logprobs_M", "entropy_M", "effective_advantages_M")


def main() -> None:
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    output, options = Path(job["output"]), job.get("trainer", {})
    sharing = options.get("fsdp_context_parallel_size", 1)
    worker = TrainerWorker(
        backend_settings(job["model"], dtype="float64", records=True, **options),
        meeting=Meeting(rank=rank, world_size=world_size, port=port),
    )
    shards = grpo_batches(seq_len=job["seq_len"], num_ranks=world_size // sharing)
    batches = shards[rank // sharing]
    if job.get("broken_rank") == rank:
        batches = [replace(b, advantages_T=b.advantages_T * np.nan) for b in batches]
    packing = check_packing(worker.backend, vocab_size=VOCAB, tolerance=Tolerance(1e-6, 1e-6))
    logprobs = worker.logprobs(batches)
    result = worker.backend.accumulate_gradient(batches, version=0)
    columns = [[getattr(one, name) for name in FACTS] for one in result.token_facts]
    for number, one in enumerate(columns):
        np.savez(output / f"facts-{rank}-{number}.npz", *one)
    gradient = {name: value.numpy() for name, value in worker.backend.export_gradient()}
    update = worker.backend.apply_gradient()
    weights = {name: value.numpy() for name, value in worker.export_weights()}
    worker.save_checkpoint(output / "checkpoint")
    worker.save_pretrained(output / "exported")
    if rank == 0:
        np.savez(output / "gradient.npz", **gradient)
        np.savez(output / "weights.npz", **weights)
        np.savez(output / "logprobs.npz", *logprobs)
        numbers = {
            "loss": result.loss,
            "norm": update.gradient_norm,
            "is_skipped": update.is_skipped,
            "packing_difference": packing.found,
            "entropy": result.metrics["entropy"].mean,
            "count": result.metrics["entropy"].count,
        }
        (output / "numbers.json").write_text(json.dumps(numbers))
    worker.close()


if __name__ == "__main__":
    main()
