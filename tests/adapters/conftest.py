"""A data folder for the links of the session."""

import json
import os

import pytest
from tests.ports import free_port


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where links and virtual environments are: two files may use the same framework."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def home(folder):
    """The same folder, for as long as the tests of one file run."""
    before = os.environ.get("TELESCOPE_HOME")
    os.environ["TELESCOPE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TELESCOPE_HOME"]
    else:
        os.environ["TELESCOPE_HOME"] = before


@pytest.fixture(scope="session")
def model_server(tmp_path_factory):
    """The address of a tiny model on vLLM, which reads prompts of published environments whole."""
    from telescope_train.inference.server import ServerSettings, running
    from telescope_train.models.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("model")
    model, longest = make_tiny_model(folder / "tiny", seed=1), 32768
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        told = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**told, key: longest}))
    settings = ServerSettings(
        model_path=str(model),
        port=free_port(),
        log_path=folder / "server.log",
        max_model_len=longest,
    )
    with running(settings, deadline_s=600):
        yield settings.base_url
