"""A real model ranks the answers of groups: scored as it said, or the whole group fails."""

import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from telescope_core import RolloutStatus
from telescope_core.evals import EvalFolder

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import TELESCOPE, environment

pytestmark = pytest.mark.engine

POEMS = '''
from telescope_core import Example, ListSource
from telescope_core.judge import RankedEnvironment


class Poems(RankedEnvironment):
    """Poems, of which the better one wins."""

    rubric = "The better poem is the better one."

    def examples(self, split):
        return ListSource([Example(id=f"p{n}", prompt=f"A poem about {n}.") for n in range(8)])
'''
RANKINGS = [
    json.dumps({"reason": "", "ranking": order}) for order in itertools.permutations((1, 2, 3))
]


def evaluated(place: Path, url: str, choices: list[str], *, exit_code: int = 0) -> list:
    """Return the rollouts of 4 groups of 3, ranked by the model with one of `choices`."""
    (place / "poems.py").write_text(POEMS)
    # The tiny model knows no JSON, so the server lets it write nothing but these.
    judge = {
        "base_url": f"{url}/v1",
        "temperature": "1",
        "max_tokens": "64",
        "prompt_price": "1",
        "completion_price": "2",
        "extra_body": json.dumps({"structured_outputs": {"choice": choices}}),
    }
    words = [word for name, value in judge.items() for word in (f"--env.judge.{name}", value)]
    played = ["eval", "./poems.py:Poems", "--base-url", f"{url}/v1", "--examples", "4"]
    limits = ["--rollouts", "3", "--max-tokens", "8", "--temperature", "1", "--output", "out"]
    done = subprocess.run(
        [*TELESCOPE, *played, *limits, *words],
        cwd=place,
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr[-3000:]
    return EvalFolder(place / "out").rows()


def test_a_group_has_the_scores_that_the_model_gave(tmp_path, vllm_server):
    groups = defaultdict(list)
    for row in evaluated(tmp_path, vllm_server, RANKINGS):
        groups[row.group_id].append(row)
    assert [len(rows) for rows in groups.values()] == [3] * 4
    for rows in groups.values():
        first, second = (json.loads(note.value)["ranking"] for note in rows[0].info)
        # In the first order the works are 1, 2, 3, and in the second one 3, 2, 1.
        early = [1 - first.index(number) / 2 for number in (1, 2, 3)]
        late = [1 - second.index(number) / 2 for number in (3, 2, 1)]
        means = [(a + b) / 2 for a, b in zip(early, late, strict=True)]
        assert sorted(row.reward for row in rows) == sorted(means)
        metrics = rows[0].metrics
        assert metrics["judge/calls"] == pytest.approx(2 / 3)
        bias = sum(one[0] - one[-1] for one in (early, late[::-1])) / 2
        assert metrics["judge/position_bias"] == pytest.approx(bias)
        agreement = 2 * sum((a - 0.5) * (b - 0.5) for a, b in zip(early, late, strict=True))
        assert metrics["judge/order_agreement"] == pytest.approx(agreement)
        tokens = metrics["judge/prompt_tokens"] + 2 * metrics["judge/completion_tokens"]
        assert metrics["judge/cost"] == pytest.approx(tokens / 1e6)


@pytest.mark.nightly
def test_a_group_whose_ranking_cannot_be_read_fails_as_a_whole(tmp_path, vllm_server):
    """Both halves of it are in `test_judge.py` and `test_eval_runner.py` of `tests/core`."""
    rows = evaluated(tmp_path, vllm_server, ['{"ranking": [1, 1, 2]}'], exit_code=7)
    assert {(row.status, row.reward) for row in rows} == {(RolloutStatus.FAILED, None)}
    for row in rows:
        assert row.status_reason == "JudgeError"
        assert "no usable answer in 3 attempts" in row.error
        assert "[1, 1, 2]" in row.error
