"""Two trainer ranks on gloo, exactly synchronous, through the real command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_core.records import RunFolder
from telescope_train.inference.server import free_port

pytestmark = pytest.mark.engine

CONFIG = """
[run]
name = "pair"
number_of_steps = 4
[model]
model = {model}
[[environments]]
name = "math-reasoning"
weight = 0.7
env = {{ level = "digit", operations = "+", instruction = "" }}
[[environments]]
name = "countdown"
weight = 0.3
env = {{ min_numbers = 3, max_numbers = 3, max_number = 9, instruction = "" }}
[rollout]
group_size = 4
prompts_batch_size_for_trainer = 8
max_tokens = 8
discard_group_zero_advantage = false
[scheduling]
max_async_rollout = 0
[trainer]
trainer_num_workers = 2
learning_rate = 1e-3
seq_len = 128
[inference]
inference_base_port = {port}
max_model_len = 64
"""


def test_two_ranks_train_synchronously(tmp_path: Path, tiny_model: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=json.dumps(str(tiny_model)), port=free_port()))
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "run.toml", "--json"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = RunFolder.open(tmp_path / "runs" / "pair")
    rows = folder.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    assert {row["staleness/max"] for row in rows} == {0}
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    assert all(row["pack/batches"] % 2 == 0 for row in rows), "each rank runs equally many"
    recorded = folder.rollouts()
    assert len(recorded) == 4 * 8 * 4
    assert {row.environment for row in recorded} == {"math-reasoning", "countdown"}
    for row in recorded:
        assert row.oldest_version == row.newest_version == row.step - 1
        assert row.logprobs is not None
        assert row.completion_ids is not None
        assert [len(turn) for turn in row.logprobs] == [len(turn) for turn in row.completion_ids]


def test_two_ranks_share_each_row_and_train_adapters(tmp_path: Path, tiny_model: Path) -> None:
    """Context parallelism, LoRA and a reference model together, through the real command."""
    config = tmp_path / "run.toml"
    more = "fsdp_context_parallel_size = 2\nuse_lora = true\nlora_rank = 4\n"
    text = CONFIG.format(model=json.dumps(str(tiny_model)), port=free_port())
    text = text.replace("learning_rate = 1e-3\n", "learning_rate = 1e-2\n" + more)
    config.write_text(text + "[algorithm]\nkl_penalty_tau = 0.01\n")
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "run.toml", "--json", "--number_of_steps", "3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = RunFolder.open(tmp_path / "runs" / "pair")
    rows = folder.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    assert "attention packed_blocks" in (folder.path / "self_tests.json").read_text()
    final = folder.checkpoints_path / "final" / "hf"
    assert (final / "adapter" / "adapter_config.json").is_file()
