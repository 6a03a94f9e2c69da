"""A real run with one server for rollouts and evals: each eval is of one version.

`test_synchronous_run` has a server for evals of its own.
"""

import sys
from pathlib import Path

import pytest

from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPointState

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = pytest.mark.engine

RUN = """
[run]
name = "beside"
number_of_steps = 10
[evals]
eval_before_training = true
eval_after_training = true
[[evals.evals]]
name = "math-reasoning"
env = { level = "digit", operations = "+", instruction = "" }
eval_every = 1
num_samples = 6
rollouts = 2
top_k = 5
top_p = 0.9
"""


@pytest.mark.nightly
def test_on_one_shared_server_new_weights_wait_for_the_eval(tmp_path, tiny_model):
    finish(train_command(tmp_path, tiny_model, RUN), tmp_path)
    points = RunFolder.open(tmp_path / "runs" / "beside").eval_points()
    assert [one.version for one in points] == [0, *range(1, 11), 10]
    for point in points:
        assert (point.state, point.versions, point.lag_steps) == (
            EvalPointState.DONE,
            (point.version,),
            0,
        )
