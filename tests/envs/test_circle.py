"""The circle through every kind of registry.

The one through a folder is part of every run of CI. The others, and the evals of a model that vLLM
serves, repeat what the tests of the stores and of evals show one by one.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cli_runs import TELESCOPE, finish
from tests.envs.circle import (
    ID,
    Engine,
    Machine,
    Place,
    go_round,
    one_answer,
    running_engine,
    train,
    training_config,
)
from tests.envs.loopback_hub import loopback_hub
from tests.envs.projects import toy_publication, write_registry
from tests.envs.serving import hub_process
from tests.envs.static_host import static_host

from telescope_core.records import RunFolder
from telescope_envs.records.lockfile import LOCK_NAME, read_lock
from telescope_train.plan.load import load_train_config
from telescope_train.plan.plan import make_plan
from telescope_train.plan.prepared import prepare
from telescope_train.plan.text import render_plan

pytestmark = pytest.mark.engine
HF_NAME = "acme/envs"
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model, and vLLM serving it for all of the evals."""
    with running_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_the_circle_through_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training has two more environments, which need different versions of one package."""
    folder = tmp_path / "registry"
    registry = write_registry(folder)

    def train_beside_two_that_conflict(user: Machine, engine: Engine) -> None:
        for name, version in VERSIONS.items():
            needs = ("telescope-core", f"six=={version}")
            publication = toy_publication(
                name=name, code=CODE, needs=needs, splits={"train": 4, "eval": 4}
            )
            registry.store.publish(publication)
        conflicting = [f"acme/{name}" for name in VERSIONS]
        user.telescope("env", "install", *conflicting)
        names = [ID, *conflicting]
        config = training_config(user, engine, names)
        with monkeypatch.context() as patched:
            patched.setenv("TELESCOPE_HOME", str(user.root / "data"))
            patched.setenv("TELESCOPE_REGISTRY", user.registry)
            patched.chdir(user.work)
            plan = make_plan(prepare(load_train_config([config])))
        assert plan.problems == ()
        shown = " ".join(render_plan(plan).split())
        assert shown.count("in a virtual environment of its own, digest") == len(names)
        assert not (user.work / "runs" / "circle").exists(), "a plan writes nothing"
        require_own_packages(train(user, engine, names), user.work / LOCK_NAME)

    with one_answer(tmp_path) as engine:
        place = Place(str(folder), str(folder))
        go_round(place, tmp_path, engine, at_last=train_beside_two_that_conflict)


def require_own_packages(run: RunFolder, lock: Path) -> None:
    """Assert that each rollout was played with its own six, and that the run says with which."""
    rows = [row for row in run.rollouts() if row.environment != ID]
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


@pytest.mark.nightly
def test_the_circle_through_the_hugging_face_hub(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a dataset repository, of a Hub on loopback."""
    write_registry(tmp_path / "registry")
    with loopback_hub() as hub:
        hub.upload(HF_NAME, tmp_path / "registry")
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        address = f"hf://{HF_NAME}"
        place = Place(address, address, variables={"TELESCOPE_HUB_TOKEN": hub.token})
        go_round(place, tmp_path, engine)


@pytest.mark.nightly
def test_the_circle_through_a_server(tmp_path: Path, engine: Engine) -> None:
    """Through a registry server, set up and run by its commands."""
    data = ["--data", str(tmp_path / "hub")]
    hub = [*TELESCOPE, "hub"]
    finish([*hub, "namespace", "add", "acme", *data], tmp_path)
    made = [*hub, "token", "create", "acme's laptop", "--scope", "publish", "--namespace", "acme"]
    secret = json.loads(finish([*made, *data, "--json"], tmp_path))["token"]
    with hub_process(tmp_path / "hub") as (_, address):
        place = Place(address, address, variables={"TELESCOPE_HUB_TOKEN": secret})
        go_round(place, tmp_path, engine)


@pytest.mark.nightly
def test_the_circle_through_a_static_host(tmp_path: Path, engine: Engine) -> None:
    """Through a registry that is rendered and lies on a static host."""
    folder, shown = tmp_path / "registry", tmp_path / "shown"
    write_registry(folder)

    def render() -> None:
        finish([*TELESCOPE, "hub", "render", str(folder), str(shown)], tmp_path)

    render()
    with static_host(shown) as host:
        go_round(Place(str(folder), host.address, refresh=render), tmp_path, engine)
