"""Two trainer ranks that go on from a checkpoint, and one more that dies while it writes one.

usage: reshard_script.py RANK 3 PORT JOB_FILE (JSON: model, output, load). It is rank 2 that dies.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from backend_cases import backend_settings, grpo_batches

from telescope_core.base.file_proofs import FileProof
from telescope_train.backends.distributed_checkpoint import FileSystemWriter, require_proved
from telescope_train.backends.protocol import DamagedStateError
from telescope_train.trainer.worker import Meeting, TrainerWorker


def main() -> None:
    rank, _, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    output = Path(job["output"])
    if rank == 2:
        output = output / "killed"
        die_while_writing(stepped(job, output, Meeting()), output)
    output = output / "both"
    worker = stepped(job, output, Meeting(rank=rank, world_size=2, port=port), load=job["load"])
    refuse_what_one_rank_reads(worker, output / "state", 2)
    weights = {name: value.numpy() for name, value in worker.export_weights()}
    if rank == 0:
        np.savez(output / "weights.npz", **weights)
    worker.close()


def stepped(job: dict, output: Path, meeting: Meeting, *, load: str = "") -> TrainerWorker:
    """Return a rank that has taken a step, saved its state and written the proofs of its files."""
    settings = backend_settings(job["model"], dtype="float64", lr_scheduler="cosine")
    worker = TrainerWorker(settings, meeting=meeting)
    if load:
        worker.load_checkpoint(load)
    batches = grpo_batches(seq_len=40, num_ranks=meeting.world_size)[meeting.rank]
    worker.train_step(batches, version=0)
    worker.start_checkpoint(output / "state", with_training_state=True)
    proofs = worker.finish_checkpoint()
    told = {name: proof.model_dump() for name, proof in proofs.items()}
    (output / f"proofs-{meeting.rank}.json").write_text(json.dumps(told))
    return worker


def refuse_what_one_rank_reads(worker: TrainerWorker, state: Path, world_size: int) -> None:
    """Every rank refuses a state of which one rank has read that a file is another."""
    dist.barrier()
    proofs = {
        name: FileProof.model_validate(proof)
        for rank in range(world_size)
        for name, proof in json.loads((state.parent / f"proofs-{rank}.json").read_text()).items()
    }
    require_proved(state, proofs)
    wrong = proofs["__0_0.distcp"].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(DamagedStateError) as refused:
        worker.load_checkpoint(state, {**proofs, "__0_0.distcp": wrong})
    assert [line.partition(" ")[0] for line in refused.value.wrong] == ["__0_0.distcp"]


def die_while_writing(worker: TrainerWorker, output: Path) -> None:
    """Kill this process as kill -9 does, with the data written and the index not."""

    def finish(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.finish = finish
    worker.save_checkpoint(output / "second")
    time.sleep(60)


if __name__ == "__main__":
    main()
