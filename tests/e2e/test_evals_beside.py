"""A real run with one server for rollouts and one for evals: each eval is of one version."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from telescope_core.evals import EvalFolder
from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPointState
from telescope_core.records.servers import ServerRole, ServerState

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = pytest.mark.engine

RUN = """
[run]
name = "beside"
number_of_steps = 10
[inference]
inference_num_workers = 2
[evals]
eval_num_servers = 1
eval_before_training = true
eval_after_training = true
[[evals.evals]]
name = "math-reasoning"
env = { level = "digit", operations = "+", instruction = "" }
eval_every = 5
num_samples = 6
rollouts = 2
top_k = 5
top_p = 0.9
"""


def test_every_token_of_an_eval_is_of_the_version_that_it_evaluates(tmp_path, tiny_model):
    shown = finish(train_command(tmp_path, tiny_model, RUN), tmp_path)
    run = RunFolder.open(tmp_path / "runs" / "beside")
    points = run.eval_points()
    assert {(one.tag, one.version) for one in points} == {
        ("before", 0),
        ("step-5", 5),
        ("step-10", 10),
        ("after", 10),
    }
    # Where steps are quicker than an eval, the next one is left out.
    skipped = [one for one in points if one.state is EvalPointState.SKIPPED]
    assert all(
        (one.tag, one.reason) == ("step-10", "the evals of step-5 were still going on")
        for one in skipped
    )
    for point in [one for one in points if one not in skipped]:
        assert (point.state, point.versions) == (EvalPointState.DONE, (point.version,)), point
        assert (point.num_scored, point.num_failed) == (12, 0)
        assert f"eval {point.tag}, math-reasoning: reward" in shown
        rows = EvalFolder(run.evals_path / f"math-reasoning-{point.tag}").rows()
        assert {row.oldest_version for row in rows} == {point.version}
        assert {row.newest_version for row in rows} == {point.version}
    assert len(run.metrics()) == 10
    served = defaultdict(list)
    for event in run.server_events():
        if event.state is ServerState.SERVING:
            served[event.role].append(event.version)
    assert served[ServerRole.ROLLOUT] == list(range(1, 11))
    assert served[ServerRole.EVAL] == [0, 5, 10] + [10] * (not skipped)
    summary = json.loads((run.path / "summary.json").read_text())
    assert set(summary["evals"]["math-reasoning"]) >= {"before", "after"}


@pytest.mark.nightly
def test_on_one_shared_server_new_weights_wait_for_the_eval(tmp_path, tiny_model):
    shared = RUN.replace("eval_num_servers = 1", "").replace("workers = 2", "workers = 1")
    finish(train_command(tmp_path, tiny_model, shared.replace("every = 5", "every = 1")), tmp_path)
    points = RunFolder.open(tmp_path / "runs" / "beside").eval_points()
    assert [one.version for one in points] == [0, *range(1, 11), 10]
    for point in points:
        assert (point.state, point.versions, point.lag_steps) == (
            EvalPointState.DONE,
            (point.version,),
            0,
        )
