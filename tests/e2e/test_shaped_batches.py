"""Minibatches, recomputed log-probs, rejection and self-tests, by the real command; its fork."""

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.ports import free_port
from tests.train.resume_run import contents

from telescope_core.records import RolloutRow, RunFolder

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import TELESCOPE, finish, train_command

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
seed_sampling = true
[scheduling]
max_async_rollout = 0
[algorithm]
use_ppo_clip = true
ppo_clip_ref_logprobs = "batch"
number_of_minibatches = 2
kl_penalty_tau = 0.05
kl_in_reward = true
entropy_coef = 0.01  # a random model earns nothing, and nothing else would move it
reference_update_every = 2
[checkpoint]
checkpoint_every = 2
"""


class Shaped(NamedTuple):
    """A run that has ended."""

    place: Path
    printed: str

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.place / "runs" / "shaped")


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Shaped:
    place = tmp_path_factory.mktemp("shaped")
    (place / "accept_some.py").write_text(ACCEPT)
    command = [*train_command(place, tiny_model, SHAPED_RUN), "--json"]
    return Shaped(place, finish(command, place, PYTHONPATH=str(place)))


def test_a_shaped_run_keeps_its_batches_full_and_its_steps_exact(shaped: Shaped) -> None:
    folder = shaped.folder
    tests = {test["name"]: test for test in folder.self_tests()}
    assert len(tests) == 8
    assert all(test["value"] <= test["limit"] for test in tests.values())
    assert tests["importance weight is 1"]["value"] == 0
    assert tests["engine and trainer agree"]["value"] < 1e-4
    assert folder.info().chat_template["keeps_answers"] is True
    assert "later turns keep answers as sampled" in shaped.printed

    rows = folder.metrics()
    assert [row["optimizer/steps"] for row in rows] == [2] * 4
    assert [row["groups/total"] for row in rows] == [4] * 4
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= 1e-3
    assert all(row["importance_weight/min"] < 1 for row in rows), "the second step has moved"
    assert all(abs(row["behave_imp_weight/mean"] - 1) < 0.2 for row in rows)
    assert rows[0]["reward_shaping/kl"] == 0, "equal to the reference"
    assert rows[1]["reward_shaping/kl"] != 0

    recorded = folder.rollouts()
    rejected = [row for row in recorded if row.status_reason == "unlucky"]
    assert len(rejected) == 4 * sum(row["groups/rejected"] for row in rows) > 0
    assert {row.status for row in rejected} == {"discarded"}
    assert len(recorded) - len(rejected) == 4 * 4 * 4, "every batch is full"
    for row in recorded:
        assert (zlib.crc32(row.example_id.encode()) % 3 == 0) == (row in rejected)


def test_a_fork_of_it_without_a_change_is_the_run_to_the_bit(shaped: Shaped) -> None:
    before = contents(shaped.folder.path)
    port = ["--inference_base_port", str(free_port())]
    command = [*TELESCOPE, "train", "--fork", "shaped", "--at", "2", *port]
    finish(command, shaped.place, PYTHONPATH=str(shaped.place))
    fork = RunFolder.open(shaped.place / "runs" / "shaped-fork-2")
    assert played(fork) == [row for row in played(shaped.folder) if row.step > 2]
    assert learned(fork) == learned(shaped.folder)
    weights = "checkpoints/final/hf/model.safetensors"
    assert contents(fork.path)[weights] == before[weights]
    (resume,) = fork.info().resumes
    assert (Path(resume.run), resume.step) == (shaped.folder.path, 2)
    assert [line.partition(":")[0] for line in resume.changed] == ["inference.inference_base_port"]
    said = finish([*TELESCOPE, "compare", "shaped", "shaped-fork-2", "--json"], shaped.place)
    compared = json.loads(said)
    assert (compared["settings"], compared["code"], compared["fork"]["step"]) == ([], [], 2)
    assert "scored the same" in compared["verdict"]
    assert contents(shaped.folder.path) == before


def played(folder: RunFolder) -> list[RolloutRow]:
    """Rollouts with their tokens, without what depends on the clock."""
    return [replace(row, generate_s=0.0, score_s=0.0) for row in folder.rollouts()]


def learned(folder: RunFolder) -> list[dict[str, float]]:
    of_training = ("loss", "grad_norm", "reward", "advantage", "kl/", "entropy", "mismatch")
    return [
        {name: value for name, value in row.items() if name.startswith(of_training)}
        for row in folder.metrics()
    ]
