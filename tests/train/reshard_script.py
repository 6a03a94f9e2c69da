"""One trainer rank as a process: continues from a checkpoint, or dies while it writes one.

usage: reshard_script.py RANK WORLD_SIZE PORT JOB_FILE (JSON: model, output, load, dies)
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from backend_cases import backend_settings, grpo_batches

from telescope_train.backends.distributed_checkpoint import FileSystemWriter
from telescope_train.trainer.worker import Meeting, TrainerWorker


def main() -> None:
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    output = Path(job["output"])
    worker = TrainerWorker(
        backend_settings(job["model"], dtype="float64", lr_scheduler="cosine"),
        meeting=Meeting(rank=rank, world_size=world_size, port=port),
    )
    if job["load"]:
        worker.load_checkpoint(job["load"])
    batches = grpo_batches(seq_len=40, num_ranks=world_size)[rank]
    worker.train_step(batches, version=0)
    worker.start_checkpoint(output / "state", with_training_state=True)
    worker.finish_checkpoint()
    if job["dies"]:
        die_while_writing(worker, output)
    weights = {name: value.numpy() for name, value in worker.export_weights()}
    if rank == 0:
        np.savez(output / "weights.npz", **weights)
    worker.close()


def die_while_writing(worker: TrainerWorker, output: Path) -> None:
    """Kill this process as kill -9 does, with the data written and the index not."""

    def finish(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.finish = finish
    worker.save_checkpoint(output / "second")
    time.sleep(60)


if __name__ == "__main__":
    main()
