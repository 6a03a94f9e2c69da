"""The commands of the tutorial of an agent, smaller: demonstrations, warm start, training."""

import json
import sys
from pathlib import Path

import pytest
from tests.ports import free_port

from telescope_core import RolloutStatus
from telescope_core.records import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import TELESCOPE, finish

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
SMALL = ["--group_size", "4", "--prompts_batch_size_for_trainer", "4", "--evals", "[]"]
WINDOW = {
    "instructions": "Use the shell.",
    "context_strategy": "sliding_window",
    "max_context_tokens": 110,
    "keep_turns": 1,
}
NO_EVALS = ["--eval_before_training", "false", "--eval_after_training", "false"]


def test_the_commands_of_the_tutorial(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = [sys.executable, "examples/agent.py", "runs/agent-demonstrations.jsonl"]
    assert "8000 demonstrations" in finish(script, tmp_path)
    finish([*TELESCOPE, "sft", "examples/agent-sft.toml"], tmp_path)

    entry = {"name": "./examples/agent.py:Numbers", "env": {"harness_options": WINDOW}}
    window = ["--branch_credit", "shared", "--environments", json.dumps([entry])]
    for name, more in [("agent", []), ("agent-window", window)]:
        flags = ["--name", name, "--number_of_steps", "2", *SMALL, *NO_EVALS, *more]
        port = ["--inference_base_port", str(free_port())]
        finish([*TELESCOPE, "train", "examples/agent.toml", *flags, *port], tmp_path)
        run = RunFolder.open(tmp_path / "runs" / name)
        rollouts = run.rollouts()
        assert len(rollouts) == 32
        assert not any(row.error or row.status is RolloutStatus.FAILED for row in rollouts)
        answers = {row.reward for row in rollouts}
        assert more == window or answers == {0.0, 1.0}, "it reads what is in no prompt"
        assert max(row.num_turns for row in rollouts) >= 3
        branched = [row["turns/branched"] for row in run.metrics() if "turns/branched" in row]
        assert (max(branched) > 0.2) == (more == window)
    assert finish([*TELESCOPE, "doctor", "runs/agent"], tmp_path)
