"""One run of the real command that learns from a teacher alone."""

import json
import sys
from pathlib import Path

import pytest

from telescope_core.records import RunFolder
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = pytest.mark.engine

RUN = """
[run]
name = "student"
number_of_steps = 2
[algorithm]
algorithm = "opd"
reference_model = "teacher"
[[environments]]
name = "math-reasoning"
env = { level = "digit", operations = "+", instruction = "" }
[rollout]
group_size = 1
prompts_batch_size_for_trainer = 16
[inference]
max_model_len = 128
"""


def test_a_student_is_trained_from_one_rollout_of_each_example(tmp_path: Path, tiny_model: Path):
    # A path from the folder of the command, which the ranks have to find from theirs.
    make_tiny_model(tmp_path / "teacher", seed=9)
    finish([*train_command(tmp_path, tiny_model, RUN), "--json"], tmp_path)
    folder = RunFolder.open(tmp_path / "runs" / "student")
    rows = folder.metrics()
    assert [row["version"] for row in rows] == [1, 2]
    for row in rows:
        assert row["advantage/mean"] == 1.0
        assert row["groups/discarded"] == 0
        # Two random models agree on nothing, and not on less than that.
        assert 0.001 < row["kl/reference"] < 5.0
    assert rows[0]["mismatch/max"] <= 1e-3
    tests = json.loads((folder.path / "self_tests.json").read_text())
    assert "packing does not leak in the reference model" in json.dumps(tests)
    assert {span.step for span in folder.timeline() if "reference" in span.name} == {1, 2}
    assert all(row.advantage == 1.0 for row in folder.rollouts())
