"""A model that is an id on the Hub: looked for once, and compared before it is downloaded."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.envs.loopback_hub import LoopbackHub, Repository, loopback_hub, own_hub_settings
from tests.ports import free_port
from tests.train.models.model_folders import Folder, save_model

from telescope_core.errors import ConfigError
from telescope_train.config.schema import ModelSection
from telescope_train.models.hub import TRIES, Kind, look_on_hub
from telescope_train.plan.checks.model import look_at_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with loopback_hub() as server, own_hub_settings(tmp_path / "home"):
        use(monkeypatch, server.address)
        yield server


def use(monkeypatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def saved(tiny: Path, folder: Path) -> Path:
    """Return a model in several files, with a tokenizer that has a chat template."""
    save_model("Qwen2", folder, in_shards=True)
    for path in tiny.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def asked(server: LoopbackHub) -> list[str]:
    return [what for what, _ in server.server.requests]


def downloads(server: LoopbackHub) -> int:
    """Return how many files of weights were fetched whole."""
    ranged = [headers for what, headers in server.storage.requests if what.startswith("GET")]
    return sum("range" not in {name.lower() for name in headers} for headers in ranged)


def test_a_model_on_the_hub_is_compared_by_its_headers_alone(hub, tiny, tmp_path):
    hub.upload("someone/model", saved(tiny, tmp_path / "model"))
    look = look_at_model(ModelSection(model="someone/model"), dtype="float32")
    assert look == ((), ())
    assert downloads(hub) == 0


def test_a_model_on_the_hub_that_lacks_a_tensor_is_refused_before_it_is_downloaded(
    hub, tiny, tmp_path
):
    changed = Folder(saved(tiny, tmp_path / "model"))
    name = changed.some("down_proj.weight")
    del changed.of(name)[name]
    changed.write()
    hub.upload("someone/model", changed.path)
    (problem,) = look_at_model(ModelSection(model="someone/model"), dtype="float32").problems
    assert name in problem
    assert "someone/model" in problem
    assert downloads(hub) == 0


@pytest.mark.parametrize("kind", Kind)
def test_an_id_that_is_not_there_is_said_with_what_to_do(kind, hub):
    with pytest.raises(ConfigError, match=r"no .*'someone/none' on .*private.*HF_TOKEN"):
        look_on_hub(kind, "someone/none")
    assert len(asked(hub)) == 1, "an answer is an answer"


def test_a_private_model_is_read_with_a_token(hub, monkeypatch):
    hub.repositories["someone/model"] = Repository(is_private=True)
    hub.repositories["someone/model"].add({"config.json": b"{}"}, "first")
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        look_on_hub(Kind.MODEL, "someone/model")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert look_on_hub(Kind.MODEL, "someone/model") is None


@pytest.mark.parametrize("kind", Kind)
def test_a_gated_repository_is_said_to_be_gated(kind, hub):
    hub.repositories["someone/gated"] = Repository(is_gated=True)
    with pytest.raises(ConfigError, match=r"gated.*ask for access.*HF_TOKEN"):
        look_on_hub(kind, "someone/gated")


def test_adapters_and_what_is_no_model_are_refused(hub):
    hub.repositories["someone/adapter"] = Repository()
    hub.repositories["someone/adapter"].add({"adapter_config.json": b"{}"}, "first")
    with pytest.raises(ConfigError, match=r"no config\.json.*adapter, merge"):
        look_on_hub(Kind.MODEL, "someone/adapter")
    hub.repositories["someone/adapter"].add({"config.json": b"{}"}, "second")
    with pytest.raises(ConfigError, match=r"adapter_config\.json.*merge_and_unload"):
        look_on_hub(Kind.MODEL, "someone/adapter")


@pytest.mark.parametrize("kind", Kind)
def test_a_hub_that_does_not_answer_is_asked_twice(kind, hub, monkeypatch):
    hub.server.hangs_up = True
    with pytest.raises(ConfigError) as raised:
        look_on_hub(kind, "someone/model")
    assert len(asked(hub)) == TRIES == 2
    for fact in ("someone/model", hub.address, "HF_ENDPOINT", "folder", "cache"):
        assert fact in str(raised.value)


def test_a_copy_in_the_cache_is_used_where_the_hub_cannot_be_asked(
    hub, tiny, tmp_path, monkeypatch
):
    from huggingface_hub import snapshot_download

    hub.upload("someone/model", saved(tiny, tmp_path / "model"))
    folder = Path(snapshot_download("someone/model"))
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    assert look_on_hub(Kind.MODEL, "someone/model") == folder
    problems, notes = look_at_model(ModelSection(model="someone/model"), dtype="float32")
    assert problems == ()
    assert "HF_HUB_OFFLINE" in notes[0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert look_on_hub(Kind.MODEL, "someone/model") == folder
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        look_on_hub(Kind.MODEL, "someone/other")


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer*"])
def test_a_folder_that_lacks_its_tokenizer_is_told_so_and_nothing_about_the_hub(
    missing, tiny, tmp_path, monkeypatch
):
    folder = saved(tiny, tmp_path / "model")
    for file in folder.glob(missing):
        file.unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,), _ = look_at_model(ModelSection(model=str(folder)), dtype="float32")
    assert "has no tokenizer.json in its folder; copy it" in problem
    assert "one of:)" not in problem
    assert "HF_HUB_OFFLINE" not in problem
