"""Runs of the real command, in processes of their own, over a tiny model."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.ports import free_port

TELESCOPE = [sys.executable, "-c", "from telescope_cli.main import main; main()"]
SMALL_RUN = """
[model]
model = {model}
[[environments]]
name = "math-reasoning"
env = {{ level = "digit", operations = "+", instruction = "" }}
[rollout]
group_size = 4
prompts_batch_size_for_trainer = 4
max_tokens = 8
[trainer]
learning_rate = 1e-3
seq_len = 128
[inference]
inference_base_port = {port}
max_model_len = 64
"""


def train_command(place: Path, model: Path, more: str, *, port: int | None = None) -> list[str]:
    """Return the command of a small run in `place`, its settings overlaid by those of `more`."""
    port = free_port() if port is None else port
    (place / "small.toml").write_text(SMALL_RUN.format(model=json.dumps(str(model)), port=port))
    (place / "run.toml").write_text(more)
    return [*TELESCOPE, "train", "small.toml", "run.toml"]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that leaves the cores to the others."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def finish(command: list[str], place: Path, **variables: str) -> str:
    """Run a command that has to succeed; returns what it printed."""
    done = subprocess.run(
        command,
        cwd=place,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
