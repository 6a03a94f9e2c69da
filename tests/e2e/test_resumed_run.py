"""A run of the real command that is stopped, and continued by the same command."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port

from telescope_core.records import RunFolder, RunState
from telescope_train.checkpoints.folders import complete_checkpoints

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import environment, finish, train_command

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

INTERRUPTED = 130

SAVED_RUN = """
[run]
name = "stopped"
number_of_steps = 6
[rollout]
discard_group_zero_advantage = false
[checkpoint]
checkpoint_every = 2
checkpoint_keep_last = 1
[evals]
eval_after_training = true
[[evals.evals]]
name = "math-reasoning"
env = { level = "digit", operations = "+", instruction = "" }
num_samples = 64
pass_k = [1]
"""


def stopped_once_saved(command: list[str], place: Path, name: str, number: signal.Signals) -> int:
    """Run a command, stop it when there is a checkpoint of that name; returns its exit code.

    SIGINT goes to the driver alone, which ends what it started; SIGKILL goes to all of them.
    """
    process = subprocess.Popen(
        command,
        cwd=place,
        env=environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        checkpoints = place / "runs" / "stopped" / "checkpoints"
        deadline_s = time.monotonic() + 240
        while not any(one.path.match(name) for one in complete_checkpoints(checkpoints)):
            assert process.poll() is None, "it ended before that checkpoint"
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        for each in [process] if number == signal.SIGINT else [process, *children]:
            try:
                each.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        code = process.wait(timeout=120)
        _, left = psutil.wait_procs(children, timeout=30)
        assert not left
        return code
    finally:
        process.kill()


def test_a_run_that_is_stopped_twice_goes_on_and_ends(tmp_path: Path, tiny_model: Path) -> None:
    """Interrupted between two steps, then killed after its last checkpoint: it is one run."""
    command = [*train_command(tmp_path, tiny_model, SAVED_RUN), "--json"]
    assert stopped_once_saved(command, tmp_path, "*", signal.SIGINT) == INTERRUPTED
    folder = RunFolder.open(tmp_path / "runs" / "stopped")
    assert folder.info().state is RunState.INTERRUPTED
    assert folder.info().reason.startswith("interrupted by SIGINT at step ")
    step = complete_checkpoints(folder.checkpoints_path)[-1].step
    port = ["--inference_base_port", str(free_port())]
    stopped_once_saved([*command, "--resume", *port], tmp_path, "final", signal.SIGKILL)
    final = folder.checkpoints_path / "final" / "checkpoint.json"
    rows, saved = folder.metrics(), final.stat().st_mtime_ns
    require_one_run(folder, step)
    assert folder.summary() is None
    finish([*command, "--resume", "--inference_base_port", str(free_port())], tmp_path)
    # What a rank did in the last second before a kill may be unknown, but not what it did then.
    spans = {(span.source, span.name) for span in folder.timeline()}
    assert ("rank 0", "load checkpoint") in spans
    summary = folder.summary()
    assert summary["evals"]["math-reasoning"]["after"]["num_scored"] == 256
    assert (folder.metrics(), final.stat().st_mtime_ns) == (rows, saved)
    assert [point.tag for point in folder.eval_points()] == ["after"]
    # Killed once more, with nothing left but the summary: no server is started for it.
    info = json.loads((folder.path / "run.json").read_text())
    gone = {**info, "state": "running", "process_started": "gone"}
    (folder.path / "run.json").write_text(json.dumps(gone))
    (folder.path / "summary.json").unlink()
    num_servers = len(folder.server_events())
    finish([*command, "--resume"], tmp_path)
    assert folder.summary() == summary
    assert folder.report_path.is_file()
    assert len(folder.server_events()) == num_servers
    assert folder.info().observed_state is RunState.FINISHED


def require_one_run(folder: RunFolder, step: int) -> None:
    """Assert that steps go on after `step`, each taken once, with what was saved of them."""
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["version"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= 1e-3
    (resume,) = folder.info().resumes
    assert resume.step == step
    assert [line.partition(":")[0] for line in resume.changed] == ["inference.inference_base_port"]
    names = [one.path.name for one in complete_checkpoints(folder.checkpoints_path)]
    assert names[-1] == "final"
    spans = {(span.source, span.name) for span in folder.timeline()}
    assert {("driver", "copy for checkpoint"), ("rank 0", "copy for checkpoint")} <= spans
    assert ("checkpoints", f"write step-{step:06d}") in spans
    assert {("driver", "credit and packing"), ("rank 0", "gradient norm")} <= spans
    assert (folder.checkpoints_path / "final" / "hf" / "config.json").is_file()
