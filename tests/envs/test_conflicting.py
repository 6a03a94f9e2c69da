"""Two environments that need different versions of one package, trained on in one run."""

import json
from pathlib import Path

import pytest
from tests.e2e.cli_runs import TELESCOPE, finish
from tests.envs.projects import toy_publication
from tests.ports import free_port

from telescope_core.records import RunFolder
from telescope_envs.records.lockfile import LOCK_NAME, read_lock
from telescope_train.models.tiny import make_tiny_model
from telescope_train.plan.load import load_train_config
from telescope_train.plan.plan import make_plan
from telescope_train.plan.prepared import prepare
from telescope_train.plan.text import render_plan

pytestmark = pytest.mark.engine
CODE = '''"""Rewards long answers, and says which six it has."""

import sys

import six

from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Toy(SingleTurnEnvironment):
    """Wants long words."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-{i}", prompt=f"{i}?") for i in range(4)])

    async def play(self, episode):
        episode.tags["six"] = six.__version__
        episode.tags["prefix"] = sys.prefix
        return await super().play(episode)

    @reward
    def long(self, rollout, example):
        return min(1.0, len(rollout.completion_text) / 16)
'''
VERSIONS = {"older": "1.16.0", "newer": "1.17.0"}
RUN = """
name = "both"
number_of_steps = 3
model = {model}
group_size = 4
prompts_batch_size_for_trainer = 4
max_tokens = 8
seq_len = 64
max_model_len = 64
inference_base_port = {port}
discard_group_zero_advantage = false
[[environments]]
name = "acme/older"
[[environments]]
name = "acme/newer"
"""


def test_two_environments_with_conflicting_needs_train_together(tmp_path, monkeypatch, registry):
    for name, version in VERSIONS.items():
        needs = ("telescope-core", f"six=={version}")
        splits = {"train": 4, "eval": 4}
        registry.store.publish(toy_publication(name=name, code=CODE, needs=needs, splits=splits))
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TELESCOPE_REGISTRY", registry.address)
    place = tmp_path / "place"
    place.mkdir()
    finish([*TELESCOPE, "env", "install", "acme/older", "acme/newer"], place)
    model = make_tiny_model(tmp_path / "tiny", seed=1)
    (place / "run.toml").write_text(RUN.format(model=json.dumps(str(model)), port=free_port()))
    monkeypatch.chdir(place)
    plan = make_plan(prepare(load_train_config([place / "run.toml"])))
    assert plan.problems == ()
    shown = " ".join(render_plan(plan).split())
    assert shown.count("in a virtual environment of its own, digest") == 2
    assert not (place / "runs").exists(), "a plan writes nothing, whoever is asked for it"
    finish([*TELESCOPE, "train", "run.toml"], place)
    _check_records(RunFolder.open(place / "runs" / "both"), place / LOCK_NAME)


def _check_records(run: RunFolder, lock: Path) -> None:
    """Each rollout was played with its own six, and the run says with which."""
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    rows = run.rollouts()
    played = {(row.environment, row.tags["six"]) for row in rows}
    assert played == {(f"acme/{name}", version) for name, version in VERSIONS.items()}
    assert len({row.tags["prefix"] for row in rows}) == 2
    recorded = run.info().environments
    for name, version in VERSIONS.items():
        code = recorded[f"acme/{name}"]
        entry = read_lock(lock).find(f"acme/{name}")
        assert entry is not None
        assert (code.version, code.wheel_sha256) == ("0.1.0", entry.sha256)
        assert (code.lock_digest, code.place) == (entry.digest, "isolated")
        assert f"six=={version}" in code.dependencies
