"""`telescope hub namespace`, `token` and `alias`: what an operator types."""

import json
import shlex
import subprocess
import sys
from contextlib import closing

import pytest
from tests.envs.projects import toy_publication

from telescope_cli import main as cli
from telescope_cli.hub.serve import plain_http_warning
from telescope_core.errors import ConfigError
from telescope_envs.records.reading import parse_namespace
from telescope_envs.records.schemas import create_registry
from telescope_envs.server.database import FILE
from telescope_envs.server.hub import HubStore


@pytest.fixture
def hub(capsys, tmp_path):
    """Run `telescope hub ... --data`; returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["hub", *arguments, "--data", str(tmp_path / "data")])
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return run


def test_a_token_is_shown_once_and_kept_as_a_hash(hub, tmp_path):
    code, told, _ = hub("namespace", "add", "acme")
    assert (code, told[:13]) == (0, "acme: added; ")
    # What it says to run next runs as it stands, with a label in its place.
    words = shlex.split(told.partition("telescope hub ")[2])
    assert words[-2:] == ["--data", str(tmp_path / "data")]
    code, secret, said = hub(*("ci of acme" if word == "LABEL" else word for word in words))
    assert code == 0
    assert secret.startswith("tsh_")
    assert len(secret.strip()) == 47
    assert "publish as acme" in said
    assert secret.strip() not in said
    data = (tmp_path / "data" / FILE).read_bytes()
    assert secret.strip().encode() not in data
    code, listed, _ = hub("token", "list")
    assert "ci of acme" in listed
    assert "tsh_" not in listed


def test_a_token_is_revoked_by_its_id(hub):
    hub("namespace", "add", "acme")
    made = json.loads(hub("token", "create", "ci", "--namespace", "acme", "--json")[1])
    assert made["namespaces"] == ["acme"]
    assert hub("token", "revoke", made["id"])[1] == f"{made['id']} ci: revoked\n"
    (row,) = json.loads(hub("token", "list", "--json")[1])
    assert row["state"] == "revoked"
    code, _, said = hub("token", "revoke", made["token"])
    assert code == 2
    assert made["token"] not in said, "an error never shows a secret"


def test_tokens_need_none_of_the_packages_that_serve(hub, tmp_path):
    hub("namespace", "add", "acme")
    program = """
import sys
sys.modules |= dict.fromkeys(("fastapi", "starlette", "uvicorn", "python_multipart"))
from telescope_cli import main
main.main(["hub", "token", "list", "--json", "--data", sys.argv[1]])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "x"], "needs the namespaces it may publish under"),
        (["create", "x", "--namespace", "acmee"], "did you mean 'acme'"),
        (["create", "x", "--scope", "read", "--namespace", "acme"], "no other scope takes any"),
        (["create", "x\ny", "--scope", "admin"], "the label must be one line of text"),
        (["create", "", "--scope", "admin"], "the label must be one line of text"),
        (["create", "x", "--scope", "admin", "--days", "0"], "needs a lifetime above 0 days"),
        (["revoke", "none"], "unknown token 'none'"),
        (["creat"], "did you mean 'create'"),
    ],
)
def test_mistakes_are_one_clear_message(hub, arguments, message):
    hub("namespace", "add", "acme")
    code, _, said = hub("token", *arguments)
    assert code == 2
    assert message in said


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\u202e", "x" * 1001, "", " "])
def test_a_registry_never_gets_a_name_that_its_clients_refuse(hub, tmp_path, name):
    hub("namespace", "add", "acme")
    code, _, said = hub("serve", "--port", "0", "--name", name)
    assert code == 2
    assert "the name of the registry" in said
    with closing(HubStore(tmp_path / "data")) as store:
        assert store.name == "hub"
        with store.database.transaction() as writer:
            writer.execute("INSERT INTO settings VALUES ('name', ?)", (f"{name}\n",))
    code, _, said = hub("serve", "--port", "0")
    assert (code, "--name" in said) == (2, True), "as an earlier version stored it"
    with pytest.raises(ConfigError, match="the name of the registry"):
        create_registry(tmp_path / "folder", owners=["acme"], name=name)
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://ann:secret@x", "must hold no user and no password"),
        ("https://ann@hub.example.org/x", "must hold no user and no password"),
        ("ftp://hub.example.org", "must be written https://HOST/PATH"),
    ],
)
def test_a_public_address_that_is_none_is_refused(hub, tmp_path, address, message):
    code, _, said = hub("serve", "--port", "0", "--public-address", address)
    assert code == 2
    assert message in said
    assert "secret" not in said
    assert not (tmp_path / "data").exists()


def test_a_mistyped_data_folder_is_said(hub, tmp_path):
    code, _, said = hub("token", "list")
    assert code == 2
    assert "is not the data folder of a served registry" in said
    assert not (tmp_path / "data").exists()


def test_namespaces_and_aliases(hub, tmp_path):
    hub("namespace", "add", "acme", "--publisher", "user:ann")
    assert json.loads(hub("namespace", "list", "--json")[1]) == [
        {"owner": "acme", "status": "active"}
    ]
    assert "must be written KIND:ID" in hub("namespace", "add", "beta", "--publisher", "ann")[2]
    assert "reserved" in hub("namespace", "add", "admin")[2]
    store = HubStore(tmp_path / "data")
    store.publish(toy_publication())
    assert hub("alias", "add", "toy", "acme/toy")[1] == "toy: acme/toy\n"
    assert store.read("aliases.toml").endswith(b'toy = "acme/toy"\n')
    store.close()
    assert "did you mean 'acme/toy'" in hub("alias", "add", "toi", "acme/toi")[2]


def test_publishers_of_an_owner_are_changed_explicitly_and_logged(hub, tmp_path):
    """They decide whose attestations count, so adding the owner again must not touch them."""
    first = "repository:acme/tools,workflow=ci.yml,issuer=https://ci.example.org"
    hub("namespace", "add", "acme", "--publisher", first)
    for again in ((), ("--publisher", "repository:evil/tools")):
        code, _, said = hub("namespace", "add", "acme", *again)
        assert code == 2
        assert f"exists already, with {first}," in said
        assert "telescope hub namespace publishers acme" in said
    with closing(HubStore(tmp_path / "data")) as store:
        record = parse_namespace(store.read("namespaces/acme.toml"), "acme.toml")
    (publisher,) = record.publishers
    assert (publisher.id, publisher.workflow) == ("acme/tools", "ci.yml")
    assert publisher.issuer == "https://ci.example.org"
    change = ("namespace", "publishers", "acme", "--publisher", "user:ann")
    # What the refusal advises names all that the command needs.
    advised = shlex.split(said.partition("run: telescope hub ")[2])
    assert advised[-2:] == ["--data", str(tmp_path / "data")]
    assert {"--publisher", "--reason"} < set(advised)
    assert hub(*change)[0] == 2, "without a reason"
    told = hub(*change, "--publisher", "repository:acme/new", "--reason", "CI moved")[1]
    assert told == "acme: published by user:ann repository:acme/new\n"
    *_, last = hub("audit")[1].splitlines()
    assert last.endswith("  publishers changed  acme user:ann repository:acme/new  (CI moved)")
    unknown = ("namespace", "publishers", "acmee", "--publisher", "user:ann", "--reason", "why")
    assert "did you mean 'acme'" in hub(*unknown)[2]


@pytest.mark.parametrize(
    "publisher",
    [
        *("ann", "robot:ann", "user:", "user:ann,workflow=ci.yml", "repository:a/b,workflow="),
        *("repository:a/b,branch=main", "repository:a/b,issuer=https://x,workflow=ci.yml"),
    ],
)
def test_a_publisher_that_is_written_wrong_is_refused(hub, publisher):
    code, _, said = hub("namespace", "add", "acme", "--publisher", publisher)
    assert code == 2
    assert "must be written KIND:ID[,workflow=FILE][,issuer=URL]" in said
    assert not hub("namespace", "list")[1]


def test_an_owner_is_suspended_and_restored(hub):
    hub("namespace", "add", "acme")
    suspend = ("namespace", "suspend", "acme", "--reason", "stolen token")
    assert hub(*suspend)[:2] == (0, "acme: suspended\n")
    assert hub("namespace", "list")[1] == "acme  suspended\n"
    told = hub(*suspend, "--withhold", "--json")[1]
    assert json.loads(told) == {"owner": "acme", "status": "withheld"}
    assert hub("namespace", "restore", "acme", "--reason", "new tokens")[1] == "acme: active\n"
    *_, last = hub("audit")[1].splitlines()
    assert last.endswith("  namespace restored  acme  (new tokens)")
    entries = json.loads(hub("audit", "--json")[1])
    assert [entry["reason"] for entry in entries] == [
        "",
        "stolen token",
        "stolen token",
        "new tokens",
    ]
    assert hub("namespace", "suspend", "acme")[0] == 2, "without a reason"


def test_a_server_that_other_machines_reach_without_a_proxy_says_so():
    for host in ("0.0.0.0", "::", "hub.example.org"):
        said = plain_http_warning(host, has_proxy=False)
        assert host in said
        assert "--trust-proxy" in said
        assert plain_http_warning(host, has_proxy=True) == ""
    for host in ("127.0.0.1", "::1", "localhost"):
        assert plain_http_warning(host, has_proxy=False) == ""
