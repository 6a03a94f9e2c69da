"""One trainer rank as a process: the gradient of one step under several objectives.

usage: rank_objectives.py RANK WORLD_SIZE PORT JOB_FILE (JSON: model, output, teacher)

With a teacher, only its log-probs are computed.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import backend_settings, samples

from telescope_train.algorithms import (
    load_algorithm,
    loss_function,
)
from telescope_train.batches.batch import PackedBatch
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection
from telescope_train.trainer.worker import Meeting, TrainerWorker

OTHERS = {"kl_penalty_tau": 0.1, "kl_estimator": "k3", "entropy_coef": 0.05}
OBJECTIVES = {
    "gspo": {"algorithm": "gspo", "clip_low": 0.5, "clip_high": 0.9, **OTHERS},
    "dapo decoupled": {"algorithm": "dapo", "use_decoupled_loss": True, **OTHERS},
    "gmpo": {"algorithm": "gmpo", "clip_low": 0.02, "clip_high": 0.02, **OTHERS},
    "opd": {"algorithm": "opd", "reference_model": "a teacher", "use_ppo_clip": True},
    "sapo": {"algorithm": "sapo", **OTHERS},
    "dppo": {"algorithm": "dppo", "dppo_threshold": 0.01, **OTHERS},
    "dr_grpo masked": {
        **{"algorithm": "dr_grpo", "seq_is_masking": True, "seq_is_mask_range": (0.9, 3.0)},
        **OTHERS,
    },
}


def settings(model):
    """A backend that keeps a reference and differentiates the entropy; losses are set later."""
    section = AlgorithmSection(**OBJECTIVES["gspo"])
    return replace(backend_settings(model, dtype="float64"), algorithm=section)


def batches_of(section: AlgorithmSection, seq_len: int, num_ranks: int) -> list[list[PackedBatch]]:
    """The batches of each rank, with old log-probs that depend on the token alone."""
    chosen = samples(16)
    weighting = load_algorithm(section.algorithm).weighting
    weights_N = token_weights(chosen, weighting, max_tokens=64)
    ranks = pack(chosen, weights_N, seq_len=seq_len, num_ranks=num_ranks)
    return [[_with_old_logprobs(batch) for batch in rank] for rank in ranks]


def _with_old_logprobs(batch: PackedBatch) -> PackedBatch:
    wave_T = np.sin(batch.token_ids_T + 2.0 * batch.positions_T).astype(np.float32)
    return replace(
        batch,
        proximal_logprobs_T=np.where(batch.mask_T, batch.behavior_logprobs_T + 0.3 * wave_T, 0),
        reference_logprobs_T=np.where(batch.mask_T, batch.behavior_logprobs_T - 0.5 * wave_T, 0),
    )


def take_gradients(worker: TrainerWorker, *, seq_len: int, rank: int, world_size: int):
    """Return the gradient of each objective as one array, and its numbers."""
    gradients, numbers = {}, {}
    for name, form in OBJECTIVES.items():
        section = AlgorithmSection(**form)
        for parameter in worker.backend._policy.parameters():
            parameter.grad = None
        worker.backend._loss = loss_function(section)
        batches = batches_of(section, seq_len, world_size)[rank]
        result = worker.backend.accumulate_gradient(batches, version=0)
        parts = [value.numpy().ravel() for _, value in worker.backend.export_gradient()]
        gradients[name] = np.concatenate(parts)
        means = {key: value.mean for key, value in result.metrics.items() if value.count}
        numbers[name] = {"loss": result.loss, **means}
    return gradients, numbers


def main() -> None:
    rank, world_size, port = (int(text) for text in sys.argv[1:4])
    job = json.loads(Path(sys.argv[4]).read_text())
    used = settings(job["model"])
    if teacher := job.get("teacher"):
        section = AlgorithmSection(algorithm="opd", reference_model=teacher)
        used = replace(used, algorithm=section)
    meeting = Meeting(rank=rank, world_size=world_size, port=port)
    worker = TrainerWorker(used, meeting=meeting)
    if teacher:
        found = worker.reference_logprobs(batches_of(section, 40, world_size)[rank])
        np.savez(Path(job["output"]) / f"reference{rank}.npz", *found)
        worker.close()
        return
    gradients, numbers = take_gradients(worker, seq_len=40, rank=rank, world_size=world_size)
    if rank == 0:
        np.savez(Path(job["output"]) / "gradients.npz", **gradients)
        (Path(job["output"]) / "numbers.json").write_text(json.dumps(numbers))
    worker.close()


if __name__ == "__main__":
    main()
