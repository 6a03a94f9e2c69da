"""Rollouts in 8 bits over vLLM, where this machine's processors have such products.

That an update is rounded as a fresh load is, `test_weight_engine` shows; what weighs its tokens and
what is refused, `tests/train/plan/test_quantization_checks.py`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from telescope_core.records import RunFolder
from telescope_train.models.device import cpu_has_amx

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import environment, train_command

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

LETTERS = """
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Letters(SingleTurnEnvironment):
    needs_answer = False

    def examples(self, split):
        return ListSource([Example(id=str(n), prompt=str(n)) for n in range(8)])

    @reward
    def share(self, rollout, example):
        return sum(one.islower() for one in rollout.completion_text) / 8
"""
RUN = """
environments = [{ name = "./letters.py:Letters" }]
[run]
name = "rounded"
number_of_steps = 5
[model]
mixed_precision_dtype = "bfloat16"
[trainer]
learning_rate = 5e-3
[scheduling]
max_async_rollout = 0
[inference]
inference_quantization = "fp8"
"""


def test_a_run_samples_in_8_bits_and_weighs_its_tokens_or_is_refused(tmp_path, tiny_model):
    (tmp_path / "letters.py").write_text(LETTERS)
    done = subprocess.run(
        train_command(tmp_path, tiny_model, RUN),
        cwd=tmp_path,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    if not cpu_has_amx():
        assert done.returncode == 2
        assert "inference_quantization = 'fp8' needs a GPU, or a CPU with AMX" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    folder = RunFolder.open(tmp_path / "runs" / "rounded")
    tests = {test["name"]: test for test in folder.self_tests()}
    assert 1e-3 < tests["engine and trainer agree"]["value"] < 0.3
    rows = folder.metrics()
    assert [row["optimizer/steps"] for row in rows] == [1] * 5
    # Each update is rounded again: the servers stay near, while the policy goes far.
    assert all(row["mismatch/mean"] < 0.3 and "tis/capped_fraction" in row for row in rows)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.1
