"""The commands of the tutorials, as written but smaller: warm start, training, evaluation."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--number_of_steps", "2", "--group_size", "4", "--prompts_batch_size_for_trainer", "4"]
DIGITS = ["--env.level", "digit", "--env.operations", "+", "--env.instruction="]
PUZZLES = {
    "name": "countdown",
    "num_samples": 8,
    "rollouts": 2,
    "max_tokens": 12,
    "env": {"max_numbers": 3, "max_number": 9, "instruction": ""},
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def telescope(place: Path, *arguments: str) -> str:
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.engine
def test_the_commands_of_the_tutorial(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    telescope(
        tmp_path,
        *("sft", "examples/sft.toml", "--number_of_steps", "12", "--warmup_steps", "2"),
        *("--batch_size", "32", "--num_examples", "500"),
    )
    train = ["train", "examples/quickstart.toml", *SMALL, "--evals", json.dumps([PUZZLES])]
    telescope(tmp_path, *train, "--inference_base_port", free_port())
    run = tmp_path / "runs" / "quickstart"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert set(summary["evals"]["countdown"]) == {"before", "after", "change"}
    assert (run / "report.html").stat().st_size > 1000
    assert len(list((run / "rollouts").glob("*.parquet"))) == 2

    synchronous = ["--name", "synchronous", "--max_async_rollout", "0", "--evals", "[]"]
    quiet = ["--eval_before_training", "false", "--eval_after_training", "false"]
    telescope(tmp_path, *train, "--inference_base_port", free_port(), *synchronous, *quiet)
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs" / "synchronous" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row.get("staleness/max", 0) for row in rows] == [0, 0]

    model = str(run / "checkpoints" / "final" / "hf")
    shape = ["--max-tokens", "12", "--examples", "4", "--rollouts", "4", "--k", "1,4"]
    measured = telescope(
        tmp_path, "eval", "math-reasoning", "--model", model, *DIGITS, *shape, "--json"
    )
    assert json.loads(measured)["num_scored"] == 16
    assert "quickstart" in telescope(tmp_path, "eval", "--report", "runs/quickstart")
