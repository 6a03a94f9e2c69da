"""One trainer rank as a process: the gradient of a step with and without shared prefixes.

usage: rank_sharing.py RANK WORLD_SIZE PORT JOB_FILE (JSON: model, output, and by the number of
ranks that share rows the port where they meet; PORT is not used)
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import VOCAB, backend_settings
from prefix_trees import all_shared, plain_batches, random_tree

from telescope_train.trainer.worker import Meeting, TrainerWorker


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    job = json.loads(Path(sys.argv[4]).read_text())
    for context, port in job["port_of_context"].items():
        meeting = Meeting(rank=rank, world_size=world_size, port=port)
        compare(job["model"], Path(job["output"]), meeting, context=int(context))


def compare(model: str, output: Path, meeting: Meeting, *, context: int) -> None:
    """Write both gradients of ranks of which `context` share their rows."""
    rank, world_size = meeting.rank, meeting.world_size
    worker = TrainerWorker(
        backend_settings(model, dtype="float64", fsdp_context_parallel_size=context),
        meeting=meeting,
    )
    assert not worker.sharing.reason, worker.sharing.reason
    samples = random_tree(np.random.default_rng(5), num=16, vocab=VOCAB)
    apart = plain_batches(samples, num_batches=2, num_ranks=world_size // context)
    together = all_shared(apart)
    for name, shards in (("apart", apart), ("together", together)):
        for parameter in worker.backend._policy.parameters():
            parameter.grad = None
        worker.backend.accumulate_gradient(shards[rank // context], version=0)
        gradient = {name: value.numpy() for name, value in worker.backend.export_gradient()}
        if rank == 0:
            np.savez(output / f"{name}-{context}.npz", **gradient)
    if rank == 0:
        saved = sum(batch.num_shared_tokens for shard in together for batch in shard)
        (output / f"saved-{context}.json").write_text(json.dumps(saved))
    worker.close()


if __name__ == "__main__":
    main()
