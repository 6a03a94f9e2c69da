"""Checkpoints over processes: another number of ranks, and a process that dies while it writes."""

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from telescope_core.base.file_proofs import FileProof, proofs_of
from telescope_core.errors import ConfigError
from telescope_train.backends.distributed_checkpoint import saved_keys
from telescope_train.checkpoints.export import read_weights
from telescope_train.trainer.worker import TrainerWorker

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import backend_settings, grpo_batches  # noqa: E402
from rank_processes import end_ranks  # noqa: E402

pytestmark = pytest.mark.engine


def reshard(world_size: int, output: Path, model: Path, *, load="", dies=False) -> None:
    """Run `reshard_script.py` once per rank; with `dies`, each must end of its SIGKILL."""
    output.mkdir()
    job = {"model": str(model), "load": str(load), "dies": dies}
    script = HERE / "reshard_script.py"
    codes, said = end_ranks(world_size, job, output, script=script, wait_s=150)
    assert codes == [-signal.SIGKILL if dies else 0] * world_size, said[0][-3000:]


def one_step(model: Path, output: Path, *, load: Path | None = None) -> dict[str, np.ndarray]:
    """Do in this process, on one rank, what the script does."""
    worker = TrainerWorker(backend_settings(model, dtype="float64", lr_scheduler="cosine"))
    try:
        if load is not None:
            worker.load_checkpoint(load)
        worker.train_step(grpo_batches(seq_len=40)[0], version=0)
        worker.save_checkpoint(output / "state")
        return {name: value.numpy().copy() for name, value in worker.export_weights()}
    finally:
        worker.close()


def largest_difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_one_rank_continues_as_two_and_two_as_one(tiny, tmp_path):
    first = one_step(tiny, tmp_path / "1")
    second = one_step(tiny, tmp_path / "11", load=tmp_path / "1" / "state")
    third = one_step(tiny, tmp_path / "111", load=tmp_path / "11" / "state")
    reshard(2, tmp_path / "12", tiny, load=tmp_path / "1" / "state")
    again = one_step(tiny, tmp_path / "121", load=tmp_path / "12" / "state")
    # What each rank said of its files while it wrote them is what is there, and of all of it.
    told = [json.loads((tmp_path / "12" / f"proofs-{rank}.json").read_text()) for rank in (0, 1)]
    proofs = {name: FileProof.model_validate(one) for part in told for name, one in part.items()}
    assert proofs == proofs_of(tmp_path / "12" / "state", {})
    assert {"__0_0.distcp", ".metadata"} <= told[0].keys()
    assert set(told[1]) == {"__1_0.distcp"}
    both = dict(np.load(tmp_path / "12" / "weights.npz"))
    assert largest_difference(both, second) < 1e-8
    saved = read_weights(tmp_path / "12" / "state")
    assert all(np.array_equal(saved[name].numpy(), value) for name, value in both.items())
    assert largest_difference(again, third) < 1e-8
    assert largest_difference(first, third) > 1e-4


def test_a_kill_while_writing_leaves_the_checkpoint_before(tiny, tmp_path):
    reshard(1, tmp_path / "killed", tiny, dies=True)
    assert not (tmp_path / "killed" / "second").exists()
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        saved_keys(tmp_path / "killed" / ".second.partial")
    resumed = one_step(tiny, tmp_path / "after", load=tmp_path / "killed" / "state")
    one_step(tiny, tmp_path / "straight")
    straight = one_step(tiny, tmp_path / "more", load=tmp_path / "straight" / "state")
    assert largest_difference(resumed, straight) == 0
