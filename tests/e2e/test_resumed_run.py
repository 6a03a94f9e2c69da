"""A run of the real command that is killed between two steps and continued by the same command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from telescope_core.records import RunFolder
from telescope_train.inference.server import free_port
from telescope_train.run_checkpoints import complete_checkpoints

pytestmark = pytest.mark.engine

CONFIG = """
[run]
name = "killed"
number_of_steps = 6
[model]
model = {model}
[[environments]]
name = "math-reasoning"
env = {{ level = "digit", operations = "+", instruction = "" }}
[rollout]
group_size = 4
prompts_batch_size_for_trainer = 4
max_tokens = 8
discard_group_zero_advantage = false
[trainer]
learning_rate = 1e-3
seq_len = 128
[inference]
inference_base_port = {port}
max_model_len = 64
[checkpoint]
checkpoint_every = 2
checkpoint_keep_last = 1
"""
CODE = "from telescope_cli.main import main; main()"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def kill_once_saved(process: subprocess.Popen, checkpoints: Path) -> None:
    """Kill the driver and all it started as soon as there is a checkpoint."""
    deadline_s = time.monotonic() + 240
    while not complete_checkpoints(checkpoints):
        assert process.poll() is None, "it ended before its first checkpoint"
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    for each in [process, *children]:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
    psutil.wait_procs(children, timeout=30)


def test_a_killed_run_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "run.toml").write_text(
        CONFIG.format(model=json.dumps(str(tiny_model)), port=free_port())
    )
    command = [sys.executable, "-c", CODE, "train", "run.toml", "--json"]
    checkpoints = tmp_path / "runs" / "killed" / "checkpoints"
    first = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        kill_once_saved(first, checkpoints)
    finally:
        first.kill()
    step = complete_checkpoints(checkpoints)[-1].step
    port = ["--inference_base_port", str(free_port())]
    again = subprocess.run(
        [*command, "--resume_from_checkpoint", "latest", *port],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.returncode == 0, again.stderr[-3000:]
    folder = RunFolder.open(tmp_path / "runs" / "killed")
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= 1e-3
    (resume,) = folder.info().resumes
    assert resume.step == step
    assert [line.partition(":")[0] for line in resume.changed] == ["inference.inference_base_port"]
    names = [one.path.name for one in complete_checkpoints(checkpoints)]
    assert names[-1] == "final"
    assert (checkpoints / "final" / "hf" / "config.json").is_file()
