"""`telescope eval` with a model folder: it starts the real vLLM itself, and ends it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_core.evals import read_result

ENVIRONMENT = """
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Short(SingleTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id=str(i), prompt=f"{i}+1=") for i in range(4)])

    @reward
    def said_something(self, rollout, example):
        return float(len(rollout.completion_text) > 0)
"""


def processes_naming(text):
    """Return the command lines of running processes that hold `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.engine
def test_eval_of_a_folder_serves_it_and_leaves_no_process(tmp_path):
    from telescope_train.models.tiny import make_tiny_model

    (tmp_path / "short_env.py").write_text(ENVIRONMENT)
    make_tiny_model(tmp_path / "tiny-model", seed=0)
    command = [sys.executable, "-c", "from telescope_cli.main import main; main()", "eval"]
    command += ["short_env:Short", "--model", "tiny-model", "--examples", "4", "--rollouts", "2"]
    command += ["--k", "1,2", "--max-tokens", "8", "--output", "out", "--json"]
    # A template that asks for the prompt in another way shows in the tokens of the prompt.
    template = "{% for m in messages %}{{ m.content }}{% endfor %}????????"
    (tmp_path / "plain.jinja").write_text(template)
    command += ["--chat-template", "plain.jinja"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "out")
    assert json.loads(done.stdout)["num_scored"] == result.num_scored == 8
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    assert len(result.chat_template) == 12
    assert result.mean_prompt_tokens == len("0+1=????????")  # of the tiny model, a letter each
    assert result.mean_completion_tokens > 0
    assert result.model == "tiny-model"
    assert (tmp_path / "out" / "server.log").exists()
    assert processes_naming(str(tmp_path)) == []
