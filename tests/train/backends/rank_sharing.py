"""One trainer rank as a process: the gradient of a step with and without shared prefixes.

usage: rank_sharing.py RANK WORLD_SIZE PORT JOB_FILE (JSON: model, output, trainer settings)
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
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    context = job["trainer"]["fsdp_context_parallel_size"]
    worker = TrainerWorker(
        backend_settings(job["model"], dtype="float64", **job["trainer"]),
        meeting=Meeting(rank=rank, world_size=world_size, port=port),
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
            np.savez(Path(job["output"]) / f"{name}.npz", **gradient)
    if rank == 0:
        saved = sum(batch.num_shared_tokens for shard in together for batch in shard)
        (Path(job["output"]) / "saved.json").write_text(json.dumps(saved))
    worker.close()


if __name__ == "__main__":
    main()
