"""One run of the real command: two ranks on gloo, exactly synchronous, evals beside, and agents.

Its start takes longer than all that happens in it, so several tests look at its folder.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from telescope_core.evals import EvalFolder
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.eval_points import EvalPointState
from telescope_core.records.servers import ServerRole, ServerState

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command
from how_to_agents import AGENTS, write_agents

pytestmark = pytest.mark.engine

RUN = """
[run]
number_of_steps = 4
[[environments]]
name = "math-reasoning"
env = { level = "digit", operations = "+", instruction = "" }
[[environments]]
name = "countdown"
env = { min_numbers = 3, max_numbers = 3, max_number = 9, instruction = "" }
[[environments]]
name = "sums:Sums"
max_tokens = 6
[[environments]]
name = "mend:Mend"
max_tokens = 6
[rollout]
prompts_batch_size_for_trainer = 8
discard_group_zero_advantage = false
[trainer]
trainer_num_workers = 2
seq_len = 256
[inference]
inference_num_workers = 2
max_model_len = 128
[evals]
eval_num_servers = 1
eval_before_training = true
eval_after_training = true
[[evals.evals]]
name = "math-reasoning"
env = { level = "digit", operations = "+", instruction = "" }
eval_every = 2
num_samples = 6
rollouts = 2
top_k = 5
top_p = 0.9
"""
SYNCHRONOUS = ("--name", "synchronous", "--max_async_rollout", "0")
"""What the first tutorial adds to a run for it."""
NUM_TURNS = {"math-reasoning": 1, "countdown": 1, **AGENTS}


class Ended(NamedTuple):
    """A run that has ended."""

    folder: RunFolder
    rows: list[RolloutRow]
    printed: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Ended:
    place = tmp_path_factory.mktemp("synchronous")
    write_agents(place)
    command = [*train_command(place, tiny_model, RUN), *SYNCHRONOUS]
    printed = finish(command, place, PYTHONPATH=str(place))
    folder = RunFolder.open(place / "runs" / "synchronous")
    return Ended(folder, folder.rollouts(), printed)


def test_two_ranks_train_synchronously(run: Ended) -> None:
    rows = run.folder.metrics()
    assert [row["version"] for row in rows] == [1, 2, 3, 4]
    assert {row["staleness/max"] for row in rows} == {0}
    assert max(row["mismatch/max"] for row in rows) <= 1e-3
    assert all(row["pack/batches"] % 2 == 0 for row in rows), "each rank runs equally many"
    assert len(run.rows) == 4 * 8 * 4
    assert {row.environment for row in run.rows} == set(NUM_TURNS)
    for row in run.rows:
        assert row.oldest_version == row.newest_version == row.step - 1
        assert row.logprobs is not None
        assert row.completion_ids is not None
        assert [len(turn) for turn in row.logprobs] == [len(turn) for turn in row.completion_ids]
    for rank in ("rank 0", "rank 1"):
        of_rank = [span for span in run.folder.timeline() if span.source == rank]
        assert {span.step for span in of_rank if span.name == "gradient reduction"} == {1, 2, 3, 4}
        assert {span.step for span in of_rank if span.name == "optimizer"} == {1, 2, 3, 4}


def test_every_token_of_an_eval_is_of_the_version_that_it_evaluates(run: Ended) -> None:
    """One of the two servers is for rollouts, the other one for evals."""
    points = run.folder.eval_points()
    assert {(one.tag, one.version) for one in points} == {
        ("before", 0),
        ("step-2", 2),
        ("step-4", 4),
        ("after", 4),
    }
    # Where steps are quicker than an eval, the next one is left out.
    skipped = [one for one in points if one.state is EvalPointState.SKIPPED]
    assert all(
        (one.tag, one.reason) == ("step-4", "the evals of step-2 were still going on")
        for one in skipped
    )
    for point in [one for one in points if one not in skipped]:
        assert (point.state, point.versions) == (EvalPointState.DONE, (point.version,)), point
        assert (point.num_scored, point.num_failed) == (12, 0)
        assert f"eval {point.tag}, math-reasoning: reward" in run.printed
        rows = EvalFolder(run.folder.evals_path / f"math-reasoning-{point.tag}").rows()
        assert {row.oldest_version for row in rows} == {point.version}
        assert {row.newest_version for row in rows} == {point.version}
    served = defaultdict(list)
    for event in run.folder.server_events():
        if event.state is ServerState.SERVING:
            served[event.role].append(event.version)
    assert served[ServerRole.ROLLOUT] == [1, 2, 3, 4]
    assert served[ServerRole.EVAL] == [0, 2, 4] + [4] * (not skipped)
    summary = json.loads((run.folder.path / "summary.json").read_text())
    assert set(summary["evals"]["math-reasoning"]) >= {"before", "after"}


def test_the_agents_of_the_how_tos_are_trained(run: Ended) -> None:
    assert [(row.status, row.num_turns) for row in run.rows] == [
        ("kept", NUM_TURNS[row.environment]) for row in run.rows
    ]
    assert all(row.num_completion_tokens > 0 for row in run.rows)
    # Random weights write special tokens, which the template does not show again: some branch.
    assert any(0 < row["turns/branched"] < 1 for row in run.folder.metrics())
