"""Checkpoints over processes: another number of ranks, and a process that dies while it writes."""

import json
import signal
import sys
from pathlib import Path
from typing import NamedTuple

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


class Alone(NamedTuple):
    """Three steps of one rank."""

    place: Path
    weights: list[dict[str, np.ndarray]]


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


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory) -> Alone:
    """The weights after each of three steps of one rank, whose states are in the folders 1 to 3."""
    place = tmp_path_factory.mktemp("alone")
    weights, load = [], None
    for number in (1, 2, 3):
        weights.append(one_step(tiny, place / str(number), load=load))
        load = place / str(number) / "state"
    return Alone(place, weights)


@pytest.fixture(scope="module")
def ran(tiny, alone, tmp_path_factory) -> Path:
    """The folders of two ranks, which go on from the first step, and of one that was killed."""
    place = tmp_path_factory.mktemp("ran")
    for name in ("both", "killed"):
        (place / name).mkdir()
    job = {"model": str(tiny), "load": str(alone.place / "1" / "state")}
    codes, said = end_ranks(3, job, place, script=HERE / "reshard_script.py", wait_s=150)
    assert codes == [0, 0, -signal.SIGKILL], "".join(said)[-3000:]
    return place


def test_one_rank_continues_as_two_and_two_as_one(tiny, alone, ran, tmp_path):
    first, second, third = alone.weights
    again = one_step(tiny, tmp_path, load=ran / "both" / "state")
    # What each rank said of its files while it wrote them is what is there, and of all of it.
    told = [json.loads((ran / "both" / f"proofs-{rank}.json").read_text()) for rank in (0, 1)]
    proofs = {name: FileProof.model_validate(one) for part in told for name, one in part.items()}
    assert proofs == proofs_of(ran / "both" / "state", {})
    assert {"__0_0.distcp", ".metadata"} <= told[0].keys()
    assert set(told[1]) == {"__1_0.distcp"}
    both = dict(np.load(ran / "both" / "weights.npz"))
    assert largest_difference(both, second) < 1e-8
    saved = read_weights(ran / "both" / "state")
    assert all(np.array_equal(saved[name].numpy(), value) for name, value in both.items())
    assert largest_difference(again, third) < 1e-8
    assert largest_difference(first, third) > 1e-4


def test_a_kill_while_writing_leaves_the_checkpoint_before(tiny, alone, ran, tmp_path):
    assert not (ran / "killed" / "second").exists()
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        saved_keys(ran / "killed" / ".second.partial")
    resumed = one_step(tiny, tmp_path, load=ran / "killed" / "state")
    assert largest_difference(resumed, alone.weights[1]) == 0
