"""Minibatches, recomputed log-probs, rejection and self-tests, by the real command."""

import sys
import zlib
from pathlib import Path

import pytest

from telescope_core.records import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = pytest.mark.engine

ACCEPT = """
import zlib


def two_of_three(group):
    return zlib.crc32(group.example_id.encode()) % 3 > 0 or "unlucky"
"""
SHAPED_RUN = """
[run]
name = "shaped"
number_of_steps = 4
[rollout]
discard_group_zero_advantage = false
should_accept_fn = "accept_some:two_of_three"
[algorithm]
use_ppo_clip = true
ppo_clip_ref_logprobs = "batch"
number_of_minibatches = 2
kl_penalty_tau = 0.05
kl_in_reward = true
reference_update_every = 2
"""


def test_a_shaped_run_keeps_its_batches_full_and_its_steps_exact(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "accept_some.py").write_text(ACCEPT)
    printed = finish(
        [*train_command(tmp_path, tiny_model, SHAPED_RUN), "--json"],
        tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    folder = RunFolder.open(tmp_path / "runs" / "shaped")
    tests = {test["name"]: test for test in folder.self_tests()}
    assert len(tests) == 7
    assert all(test["value"] <= test["limit"] for test in tests.values())
    assert tests["importance weight is 1"]["value"] == 0
    assert tests["engine and trainer agree"]["value"] < 1e-4
    assert folder.info().chat_template["keeps_answers"] is True
    assert "later turns keep answers as sampled" in printed

    rows = folder.metrics()
    assert [row["optimizer/steps"] for row in rows] == [2] * 4
    assert [row["groups/total"] for row in rows] == [4] * 4
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= 1e-3
    assert all(row["importance_weight/min"] < 1 for row in rows), "the second step has moved"
    assert all(abs(row["behave_imp_weight/mean"] - 1) < 0.2 for row in rows)
    assert rows[0]["reward_shaping/kl"] == pytest.approx(0.0, abs=1e-4), "equal to the reference"
    assert rows[1]["reward_shaping/kl"] != 0

    recorded = folder.rollouts()
    rejected = [row for row in recorded if row.status_reason == "unlucky"]
    assert len(rejected) == 4 * sum(row["groups/rejected"] for row in rows) > 0
    assert {row.status for row in rejected} == {"discarded"}
    assert len(recorded) - len(rejected) == 4 * 4 * 4, "every batch is full"
    for row in recorded:
        assert (zlib.crc32(row.example_id.encode()) % 3 == 0) == (row in rejected)
