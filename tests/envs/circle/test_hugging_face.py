"""The circle through a dataset repository, of a Hugging Face Hub on loopback."""

import pytest
from tests.envs.circle.circle import Place, engine, go_round
from tests.envs.loopback_hub import loopback_hub
from tests.envs.projects import write_registry

pytestmark = pytest.mark.engine
__all__ = ["engine"]
NAME = "acme/envs"


def test_the_circle_through_the_hugging_face_hub(tmp_path, engine, monkeypatch):
    write_registry(tmp_path / "registry")
    with loopback_hub() as hub:
        hub.upload(NAME, tmp_path / "registry")
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        place = Place(f"hf://{NAME}", f"hf://{NAME}", variables={"TELESCOPE_HUB_TOKEN": hub.token})
        go_round(place, tmp_path, engine)
