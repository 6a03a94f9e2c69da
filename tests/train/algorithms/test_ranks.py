"""Objectives on the FSDP2 backend: one gradient on 1, 2 and 4 ranks, and of the entropy too."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from telescope_train.worker import TrainerWorker

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from rank_objectives import OBJECTIVES, settings, take_gradients  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def alone(tiny):
    """One rank, all samples in one batch."""
    return one_rank(tiny)


def one_rank(tiny):
    worker = TrainerWorker(settings(tiny))
    try:
        return take_gradients(worker, seq_len=4096, rank=0, world_size=1)
    finally:
        worker.close()


def run_ranks(world_size: int, job: dict) -> None:
    """Run one process per rank; every process is gone when this returns."""
    job_file = Path(job["output"]) / "job.json"
    job_file.write_text(json.dumps(job))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(HERE / "rank_objectives.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world_size), port, str(job_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=240)
            assert rank.returncode == 0, output[-3000:]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_and_micro_batches_do_not_change_an_objective(tiny, alone, tmp_path, world_size):
    run_ranks(world_size, {"model": str(tiny), "output": str(tmp_path)})
    gradients, numbers = alone
    together = np.load(tmp_path / "gradients.npz")
    found = json.loads((tmp_path / "numbers.json").read_text())
    for name in OBJECTIVES:
        difference = np.linalg.norm(together[name] - gradients[name])
        assert difference <= 1e-6 * np.linalg.norm(gradients[name]), name
        assert found[name] == pytest.approx(numbers[name], rel=1e-6, abs=1e-12), name


def test_objectives_differ_and_their_entropy_has_a_gradient(tiny, alone, monkeypatch):
    gradients, numbers = alone
    assert len({round(float(np.linalg.norm(value)), 9) for value in gradients.values()}) == 4
    assert 0 < numbers["gspo"]["clip_fraction/high"] < 1
    assert 0 < numbers["dr_grpo masked"]["seq_is_mask/fraction"] < 1
    form = {key: value for key, value in OBJECTIVES["gspo"].items() if key != "entropy_coef"}
    monkeypatch.setitem(OBJECTIVES, "gspo", form)
    without, _ = one_rank(tiny)
    change = np.linalg.norm(without["gspo"] - gradients["gspo"])
    assert change > 1e-4 * np.linalg.norm(gradients["gspo"])
