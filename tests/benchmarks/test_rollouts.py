"""The benchmark of rollouts: our side plays against its mock server, and is paid for right answers.

The peer's side needs a package index, and runs only with the benchmark itself.
"""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from bench_rollouts import Side, run_side  # noqa: E402
from rollouts.problems import NUM_PROBLEMS, NUM_TOKENS, answer, reply, score  # noqa: E402

from telescope_core.chat.replies import read_token_completion  # noqa: E402


@pytest.mark.slow
def test_our_side_plays_every_rollout():
    ours = Side(name="ours", module="rollouts.ours", python=Path(sys.executable), fewest=1)
    found = run_side(ours, concurrency=32, num_rollouts=2 * NUM_PROBLEMS)
    assert found["num_scored"] == 2 * NUM_PROBLEMS
    assert found["per_s"] > 0


@pytest.mark.slow
def test_a_side_that_dies_stops_the_benchmark():
    broken = Side(name="broken", module="rollouts.nothing", python=Path(sys.executable), fewest=1)
    with pytest.raises(subprocess.CalledProcessError):
        run_side(broken, concurrency=1, num_rollouts=1)


def test_replies_hold_the_tokens_and_mostly_the_answer():
    scores = []
    for index in range(NUM_PROBLEMS):
        completion = read_token_completion(reply(index), where="memory")
        assert len(completion.completion_ids) == len(completion.logprobs) == NUM_TOKENS
        scores.append(score(completion.message.content, answer(index)))
    assert sum(scores) / len(scores) == 0.75
