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
SUMMARIES = {
    "instructions": "Use the shell.",
    "context_strategy": "summarize",
    "max_context_tokens": 110,
}
NO_EVALS = ["--eval_before_training", "false", "--eval_after_training", "false"]


def test_the_commands_of_the_tutorial(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = [sys.executable, "examples/agent.py", "runs/agent-demonstrations.jsonl"]
    assert "8000 demonstrations" in finish(script, tmp_path)
    sft = [*TELESCOPE, "sft", "examples/agent-sft.toml"]
    finish(sft, tmp_path)
    data, start = "runs/agent-summaries.jsonl", "runs/agent-summaries-start"
    assert "16000 demonstrations" in finish([*script[:2], data, "summarize"], tmp_path)
    more = ["--dataset", data, "--output", start, "--stop_at_accuracy", "0.58"]
    finish([*sft, *more], tmp_path)

    env = {"max_turns": 6, "harness_options": SUMMARIES}
    entry = {"name": "./examples/agent.py:Numbers", "env": env}
    branches = ["--model", start, "--branch_credit", "shared", "--max_model_len", "768"]
    branches += ["--environments", json.dumps([entry])]
    for name, more in [("agent", []), ("agent-summaries", branches)]:
        flags = ["--name", name, "--number_of_steps", "2", *SMALL, *NO_EVALS, *more]
        port = ["--inference_base_port", str(free_port())]
        finish([*TELESCOPE, "train", "examples/agent.toml", *flags, *port], tmp_path)
        run = RunFolder.open(tmp_path / "runs" / name)
        rollouts = run.rollouts()
        assert len(rollouts) == 32
        assert not any(row.error or row.status is RolloutStatus.FAILED for row in rollouts)
        answers = {row.reward for row in rollouts}
        assert answers == {0.0, 1.0}, "it reads what is in no prompt"
        assert max(row.num_turns for row in rollouts) >= 3
        branched = [row["turns/branched"] for row in run.metrics() if "turns/branched" in row]
        assert (max(branched) > 0.2) == (more == branches)
    assert finish([*TELESCOPE, "doctor", "runs/agent"], tmp_path)
