"""Objectives on the FSDP2 backend: one gradient on 1, 2 and 4 ranks, and of the entropy too."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from telescope_train.trainer.worker import TrainerWorker

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from rank_objectives import OBJECTIVES, settings, take_gradients  # noqa: E402
from rank_processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tiny(tiny_of_quickstart):
    """A model in which some ratios are beyond the clip."""
    return tiny_of_quickstart


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


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_and_micro_batches_do_not_change_an_objective(tiny, alone, tmp_path, world_size):
    run_ranks(world_size, {"model": str(tiny)}, tmp_path, script=HERE / "rank_objectives.py")
    gradients, numbers = alone
    together = np.load(tmp_path / "gradients.npz")
    found = json.loads((tmp_path / "numbers.json").read_text())
    for name in OBJECTIVES:
        difference = np.linalg.norm(together[name] - gradients[name])
        assert difference <= 1e-6 * np.linalg.norm(gradients[name]), name
        assert found[name] == pytest.approx(numbers[name], rel=1e-6, abs=1e-12), name


def test_objectives_differ_and_their_entropy_has_a_gradient(tiny, alone, monkeypatch):
    gradients, numbers = alone
    assert len({round(float(np.linalg.norm(value)), 9) for value in gradients.values()}) == 7
    assert 0 < numbers["gspo"]["clip_fraction/high"] < 1
    assert 0 < numbers["gmpo"]["clip_fraction/high"] < 1
    assert 0 < numbers["dppo"]["clip_fraction/high"] < 1
    assert 0 < numbers["dr_grpo masked"]["seq_is_mask/fraction"] < 1
    form = {key: value for key, value in OBJECTIVES["gspo"].items() if key != "entropy_coef"}
    monkeypatch.setitem(OBJECTIVES, "gspo", form)
    without, _ = one_rank(tiny)
    change = np.linalg.norm(without["gspo"] - gradients["gspo"])
    assert change > 1e-4 * np.linalg.norm(gradients["gspo"])
