"""A planted token is nowhere in what failing commands say, and goes to its own host alone."""

import json
import os
import subprocess
import sys

import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.static_host import place_at, static_host

from telescope_cli.main import main
from telescope_core.errors import RegistryError
from telescope_envs.registry.stores.http import open_http

SECRET = "planted-secret-token"


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """The user's registry, and another host; the user's token is in the environment."""
    write_registry(tmp_path / "registry").store.publish(toy_publication("0.1.0"))
    (tmp_path / "registry/v1").mkdir()
    (tmp_path / "registry/v1/index.json").write_text("[]")
    with static_host(tmp_path / "registry") as own, static_host(tmp_path / "registry") as other:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("TELESCOPE_REGISTRY", own.address)
        monkeypatch.setenv("TELESCOPE_HUB_TOKEN", SECRET)
        yield own, other


FAULTS = {
    "refused": lambda handler: handler.answer(401),
    "forbidden": lambda handler: handler.answer(403),
    "in trouble": lambda handler: handler.answer(500),
    "echo": lambda handler: handler.answer(200, handler.headers["Authorization"].encode()),
    "packed": lambda handler: handler.answer(200, b"x", Content_Encoding="br"),
    "loop": lambda handler: handler.answer(302, Location="/config.json"),
    "redirect with it": lambda handler: handler.answer(
        302, Location=f"http://{handler.headers['Authorization'].split()[1]}@127.0.0.1:1/"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_failing_command_shows_it(hosts, capsys, fault):
    own, _ = hosts
    own.faults["/config.json"] = FAULTS[fault]
    for command in (["env", "info", "toy"], ["env", "list", "--json"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 4
        said = capsys.readouterr()
        assert own.address in said.err
        assert SECRET not in said.out + said.err
    assert own.tokens_seen() == {f"Bearer {SECRET}"}


@pytest.mark.parametrize("variable", ["TELESCOPE_HUB_TOKEN", "TELESCOPE_REGISTRY"])
def test_not_even_one_that_is_broken(hosts, capsys, monkeypatch, variable):
    broken = {"TELESCOPE_HUB_TOKEN": f"{SECRET}\n{SECRET}"}
    monkeypatch.setenv(variable, broken.get(variable, f"https://x:{SECRET}@127.0.0.1"))
    with pytest.raises(SystemExit) as ended:
        main(["env", "info", "toy"])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert SECRET not in said.out + said.err
    assert variable == "TELESCOPE_REGISTRY" or variable in said.err


def test_a_traceback_does_not_show_it(hosts):
    code = (
        "from telescope_envs.registry.credentials import token_for\n"
        "import os\n"
        "token = token_for(os.environ['TELESCOPE_REGISTRY'])\n"
        "assert token\n"
        "raise ValueError(token, {'headers': [token]}) from KeyError(token)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ValueError" in done.stderr
    assert SECRET not in done.stderr


def test_an_address_from_elsewhere_gets_no_token(hosts, capsys):
    own, other = hosts
    with pytest.raises(SystemExit):
        main(["env", "list", "--registry", other.address, "--json"])
    assert len(other.requests) >= 1
    assert other.tokens_seen() == set()
    assert own.requests == []
    assert SECRET not in capsys.readouterr().out


@pytest.mark.parametrize("api", ["OTHER/api", "//127.0.0.1/api", "../api", "/api", "a@b:c"])
def test_an_api_elsewhere_gets_no_token(hosts, tmp_path, api):
    own, other = hosts
    config = {"name": "test", "api": api.replace("OTHER", other.address)}
    (tmp_path / "registry/config.json").write_text(json.dumps(config))
    with pytest.raises(RegistryError, match="api must be a path below the registry"):
        open_http(place_at(own.address, tmp_path / "cache", token=SECRET))
    assert other.requests == []
