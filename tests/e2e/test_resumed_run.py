"""A run of the real command that is killed between two steps and continued by the same command."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port

from telescope_core.records import RunFolder
from telescope_train.checkpoints.folders import complete_checkpoints

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import environment, finish, train_command

pytestmark = pytest.mark.engine

SAVED_RUN = """
[run]
name = "killed"
number_of_steps = 6
[rollout]
discard_group_zero_advantage = false
[checkpoint]
checkpoint_every = 2
checkpoint_keep_last = 1
"""


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
    command = [*train_command(tmp_path, tiny_model, SAVED_RUN), "--json"]
    checkpoints = tmp_path / "runs" / "killed" / "checkpoints"
    first = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        kill_once_saved(first, checkpoints)
    finally:
        first.kill()
    step = complete_checkpoints(checkpoints)[-1].step
    port = ["--inference_base_port", str(free_port())]
    finish([*command, "--resume", *port], tmp_path)
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
