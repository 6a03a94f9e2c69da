"""Backend megatron in a real run: tensor-parallel ranks train, then data-parallel ones go on.

That a checkpoint of some ranks is one of others is also shown without a run, in
`tests/train/backends/test_megatron_layouts.py`.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.ports import free_port
from transformers import AutoModelForCausalLM

from telescope_core.records import RunFolder
from telescope_train.checkpoints.export import export_checkpoint
from telescope_train.checkpoints.folders import read_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = pytest.mark.engine

MEGATRON_RUN = """
[run]
name = "shared"
number_of_steps = 2
[rollout]
discard_group_zero_advantage = false
[scheduling]
max_async_rollout = 0
[algorithm]
# Random answers are all wrong; this moves the weights nevertheless.
entropy_coef = 0.01
[trainer]
train_backend = "megatron"
trainer_num_workers = 2
learning_rate = 1e-2
[checkpoint]
checkpoint_every = 1
[megatron]
megatron_tensor_parallel_size = 2
"""


class Ended(NamedTuple):
    """A run of two steps that has ended."""

    place: Path
    command: list[str]

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.place / "runs" / "shared")


@pytest.fixture
def shared(tmp_path: Path, tiny_model: Path) -> Ended:
    command = [*train_command(tmp_path, tiny_model, MEGATRON_RUN), "--json"]
    finish(command, tmp_path)
    return Ended(tmp_path, command)


def test_a_run_of_tensor_parallel_ranks_is_exported(shared: Ended, tiny_model: Path) -> None:
    rows = shared.folder.metrics()
    assert [row["version"] for row in rows] == [1, 2]
    # Rollouts of a version are scored by the ranks that made it, so the servers have its weights.
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    folder = shared.folder.checkpoints_path
    # What `telescope export` calls, without starting another Python.
    exported = shared.place / "exported"
    export_checkpoint(
        read_checkpoint(folder / "step-000001"), exported, dtype=None, max_shard_size="5GB"
    )
    require_moved(tiny_model, exported, folder / "final" / "hf")


@pytest.mark.nightly
def test_a_run_goes_on_with_other_ranks(shared: Ended, tiny_model: Path) -> None:
    more = ["--number_of_steps", "3", "--megatron_tensor_parallel_size", "1"]
    port = ["--inference_base_port", str(free_port())]
    finish([*shared.command, "--resume", *more, *port], shared.place)
    rows = shared.folder.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    (resume,) = shared.folder.info().resumes
    assert "megatron.megatron_tensor_parallel_size: 2 -> 1" in resume.changed
    require_moved(tiny_model, shared.folder.checkpoints_path / "final" / "hf")


def require_moved(*models: Path) -> None:
    """Assert that the weights of each model are some way from those of the model before it."""
    weights = [AutoModelForCausalLM.from_pretrained(path).state_dict() for path in models]
    for before, after in pairwise(weights):
        assert before.keys() == after.keys()
        moved = max((after[name] - value).abs().max() for name, value in before.items())
        # Adam's first steps are as long as the learning rate in every direction.
        assert torch.isfinite(moved)
        assert moved > 1e-3
