"""Backend megatron in a real run: tensor-parallel ranks train, then data-parallel ones go on."""

import sys
from itertools import pairwise
from pathlib import Path

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


def test_a_run_goes_on_with_other_ranks_and_is_exported(tmp_path: Path, tiny_model: Path) -> None:
    command = [*train_command(tmp_path, tiny_model, MEGATRON_RUN), "--json"]
    finish(command, tmp_path)
    more = ["--number_of_steps", "3", "--megatron_tensor_parallel_size", "1"]
    finish([*command, "--resume", *more, "--inference_base_port", str(free_port())], tmp_path)
    folder = RunFolder.open(tmp_path / "runs" / "shared")
    rows = folder.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3]
    # Rollouts of a version are scored by the ranks that made it, so the servers have its weights.
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    (resume,) = folder.info().resumes
    assert "megatron.megatron_tensor_parallel_size: 2 -> 1" in resume.changed
    first, last = folder.checkpoints_path / "step-000001", folder.checkpoints_path / "final"
    # What `telescope export` calls, without starting another Python.
    export_checkpoint(
        read_checkpoint(first), tmp_path / "exported", dtype=None, max_shard_size="5GB"
    )
    steps = [
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tiny_model, tmp_path / "exported", last / "hf")
    ]
    for before, after in pairwise(steps):
        assert before.keys() == after.keys()
        moved = max((after[name] - value).abs().max() for name, value in before.items())
        # Adam's first steps are as long as the learning rate in every direction.
        assert torch.isfinite(moved)
        assert moved > 1e-3
