"""Tokens: where they come from, whom they are for, and that nothing shows them."""

import json
import re
from pathlib import Path

import keyring
import pytest
from keyring.backend import KeyringBackend
from keyring.backends.fail import Keyring as NoKeyring
from keyring.errors import KeyringLocked

from telescope_cli.main import main
from telescope_core.errors import ConfigError
from telescope_envs.registry.credentials import (
    Token,
    checked_token,
    login_hint,
    token_for,
)

CORP, LAB = "https://hub.example/corp", "https://hub.example/lab"
SECRET = "planted-secret"


class InMemory(KeyringBackend):
    """A keyring that ends with the test."""

    priority = 1

    def __init__(self):
        super().__init__()
        self.kept: dict[tuple[str, str], str] = {}

    def get_password(self, service, username):
        return self.kept.get((service, username))

    def set_password(self, service, username, password):
        self.kept[service, username] = password

    def delete_password(self, service, username):
        del self.kept[service, username]


class Locked(InMemory):
    def get_password(self, service, username):
        raise KeyringLocked("locked")

    set_password = None

    def __init__(self):
        super().__init__()
        self.set_password = lambda *_: self.get_password("", "")


class Forgetful(InMemory):
    def set_password(self, service, username, password):
        """Keep nothing."""


@pytest.fixture(autouse=True)
def no_keyring():
    before = keyring.get_keyring()
    keyring.set_keyring(NoKeyring())
    yield
    keyring.set_keyring(before)


@pytest.fixture
def backend():
    keyring.set_keyring(InMemory())
    return keyring.get_keyring()


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """The variables of a user with two registries on one host, corp the default."""
    path = tmp_path / ".config/telescope/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(f'registry = "corp"\n[registries]\ncorp = "{CORP}"\nthe-lab = "{LAB}"\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("TELESCOPE_REGISTRY", raising=False)
    return {"HOME": str(tmp_path)}


def test_the_plain_variable_is_for_the_default_registry_alone(environ):
    environ["TELESCOPE_HUB_TOKEN"] = SECRET
    assert token_for(CORP, environ=environ) == SECRET
    for other in (LAB, "https://hub.example", "https://evil.example/corp", "hf://acme/envs"):
        assert token_for(other, environ=environ) is None
    environ["TELESCOPE_REGISTRY"] = "the-lab"
    assert token_for(LAB, environ=environ) == SECRET
    assert token_for(CORP, environ=environ) is None


def test_a_registry_with_a_name_has_a_variable_of_its_own(environ):
    environ |= {"TELESCOPE_HUB_TOKEN_THE_LAB": "lab", "TELESCOPE_HUB_TOKEN": "default"}
    assert token_for(LAB, environ=environ) == "lab"
    assert token_for(CORP, environ=environ) == "default"
    environ["TELESCOPE_HUB_TOKEN_CORP"] = "corp"
    assert token_for(CORP, environ=environ) == "corp"


def test_a_hub_repository_has_one_token_for_all_revisions(environ):
    repository = "hf://acme/envs"
    environ |= {"TELESCOPE_REGISTRY": repository, "TELESCOPE_HUB_TOKEN": SECRET}
    assert token_for(f"{repository}@v1", environ=environ) == SECRET
    assert token_for("hf://acme/other", environ=environ) is None


def test_a_folder_has_none(environ, tmp_path):
    environ |= {"TELESCOPE_REGISTRY": str(tmp_path), "TELESCOPE_HUB_TOKEN": SECRET}
    assert token_for(str(tmp_path), environ=environ) is None


def test_the_keyring_is_asked_after_the_variables(environ, backend):
    backend.set_password("telescope-hub", CORP, "kept")
    assert token_for(CORP, environ=environ) == "kept"
    assert token_for(LAB, environ=environ) is None
    environ["TELESCOPE_HUB_TOKEN"] = SECRET
    assert token_for(CORP, environ=environ) == SECRET


def test_a_locked_keyring_is_no_reason_not_to_read(environ):
    keyring.set_keyring(Locked())
    assert token_for(CORP, environ=environ) is None


def test_a_token_does_not_show_itself():
    token = Token(SECRET)
    assert SECRET not in repr(token)
    assert SECRET not in repr({"token": token, "more": [token]})


@pytest.mark.parametrize("text", ["", "  \n", f"{SECRET}\nmore", f"{SECRET} x", f"{SECRET}\u00e9"])
def test_what_is_no_token_is_refused_without_showing_it(text):
    with pytest.raises(ConfigError, match="VARIABLE does not hold a token") as refused:
        checked_token(text, "VARIABLE")
    assert SECRET not in str(refused.value)


def test_the_hint_names_what_works(environ):
    """The variables and the command of a hint are those that give a token afterwards."""
    named, elsewhere = login_hint(CORP, environ=environ), "https://else.example"
    (variable,) = re.findall("TELESCOPE_[A-Z_]+", named)
    assert token_for(CORP, environ={**environ, variable: SECRET}) == SECRET
    unnamed = login_hint(elsewhere, environ=environ)
    command = f"telescope hub login --registry {elsewhere}"
    assert command in unnamed
    address, token = sorted(set(re.findall("TELESCOPE_[A-Z_]+", unnamed)), reverse=True)
    given = {**environ, address: elsewhere, token: SECRET}
    assert token_for(elsewhere, environ=given) == SECRET


@pytest.fixture
def telescope(environ, capsys, monkeypatch):
    def call(*arguments, typed: str = "") -> tuple[int, str, str]:
        (path := tmp(environ)).write_text(typed)
        with path.open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            with pytest.raises(SystemExit) as ended:
                main(["hub", *arguments])
        said = capsys.readouterr()
        assert SECRET not in said.out + said.err
        return int(ended.value.code or 0), said.out, said.err

    return call


def tmp(environ):
    return Path(environ["HOME"]) / "typed"


def test_login_and_logout(telescope, backend, environ):
    assert telescope("login", typed=f"{SECRET}\n") == (0, f"{CORP}: token stored\n", "")
    assert token_for(CORP, environ=environ) == SECRET
    code, said, _ = telescope("login", "--registry", "the-lab", "--json", typed=SECRET)
    assert (code, json.loads(said)) == (0, {"registry": LAB, "token": "stored"})
    assert telescope("logout") == (0, f"{CORP}: token removed\n", "")
    assert telescope("logout")[1] == f"{CORP}: token was not there\n"
    assert token_for(CORP, environ=environ) is None
    assert token_for(LAB, environ=environ) == SECRET


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        (NoKeyring, "is not a usable keyring: this system has none, so nothing was stored"),
        (Locked, "refused with KeyringLocked, so nothing was stored"),
        (Forgetful, "does not return what is stored in it, so nothing was stored"),
    ],
)
def test_login_without_a_keyring_says_what_to_do(telescope, ring, message):
    keyring.set_keyring(ring())
    code, said, error = telescope("login", typed=SECRET)
    assert (code, said) == (2, "")
    assert message in error
    assert "put it in the environment variable TELESCOPE_HUB_TOKEN_CORP" in error


@pytest.mark.parametrize(
    ("arguments", "typed", "message"),
    [
        ((), "", "got no token"),
        ((), "two words\n", "does not hold a token"),
        (("--registry", "corpp"), SECRET, "did you mean 'corp'"),
        (("--registry", "."), SECRET, "is a folder, which needs no token"),
    ],
)
def test_mistakes_at_login_are_explained(telescope, backend, arguments, typed, message):
    code, _, error = telescope("login", *arguments, typed=typed)
    assert code == 2
    assert message in error
    assert backend.kept == {}
