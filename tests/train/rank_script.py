"""One trainer rank as a process: takes a gradient, writes what the tests compare.

usage: rank_script.py RANK WORLD_SIZE PORT JOB_FILE (JSON: model, seq_len, output)
"""

import json
import sys
from pathlib import Path

import numpy as np
from backend_cases import backend_settings, grpo_batches

from telescope_train.worker import TrainerWorker


def main() -> None:
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    output = Path(job["output"])
    worker = TrainerWorker(
        backend_settings(job["model"], dtype="float64"),
        rank=rank,
        world_size=world_size,
        master_port=port,
    )
    batches = grpo_batches(seq_len=job["seq_len"], num_ranks=world_size)[rank]
    result = worker.backend.accumulate_gradient(batches, version=0)
    gradient = {name: value.numpy() for name, value in worker.backend.export_gradient()}
    update = worker.backend.apply_gradient()
    weights = {name: value.numpy() for name, value in worker.export_weights()}
    worker.save_checkpoint(output / "checkpoint")
    worker.save_pretrained(output / "exported")
    if rank == 0:
        np.savez(output / "gradient.npz", **gradient)
        np.savez(output / "weights.npz", **weights)
        numbers = {
            "loss": result.loss,
            "norm": update.gradient_norm,
            "entropy": result.metrics["entropy"].mean,
            "count": result.metrics["entropy"].count,
        }
        (output / "numbers.json").write_text(json.dumps(numbers))
    worker.close()


if __name__ == "__main__":
    main()
