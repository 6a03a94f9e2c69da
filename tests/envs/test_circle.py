"""The circle through every kind of registry.

The one through a folder is part of every run of CI. The others, and the evals of a model that vLLM
serves, repeat what the tests of the stores and of evals show one by one.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cli_runs import TELESCOPE, finish
from tests.envs.circle import Engine, Place, go_round, one_answer, running_engine
from tests.envs.loopback_hub import loopback_hub
from tests.envs.projects import write_registry
from tests.envs.serving import hub_process
from tests.envs.static_host import static_host

pytestmark = pytest.mark.engine
HF_NAME = "acme/envs"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model, and vLLM serving it for all of the evals."""
    with running_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_the_circle_through_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    write_registry(folder)
    with one_answer(tmp_path) as engine:
        go_round(Place(str(folder), str(folder)), tmp_path, engine)


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
