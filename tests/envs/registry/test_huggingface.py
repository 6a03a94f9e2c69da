"""A registry in a dataset repository: one commit is read, and a change is one commit on it."""

import json
import os
import re
import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import close_session, try_to_load_from_cache
from tests.envs.loopback_hub import loopback_hub, own_hub_settings
from tests.envs.projects import toy_publication, write_registry
from tests.envs.static_host import place_at

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.release import Status
from telescope_envs.registry import Opening, Registry, open_registry, resolve
from telescope_envs.registry.stores.huggingface import HuggingFaceStore

NAME = "acme/envs"
INDEX = "index/acme/toy.jsonl"


@pytest.fixture
def hub(tmp_path):
    write_registry(tmp_path / "registry").store.publish(toy_publication("0.1.0"))
    with loopback_hub() as server:
        server.upload(NAME, tmp_path / "registry")
        yield server


@pytest.fixture
def open_store(hub, tmp_path):
    def call(text=f"hf://{NAME}", *, endpoint=hub.address, max_tries=4, **how) -> HuggingFaceStore:
        place = place_at(text, tmp_path / "cache", **how)
        return HuggingFaceStore(place, endpoint=endpoint, max_tries=max_tries)

    with own_hub_settings(tmp_path):
        yield call


def test_a_branch_that_moves_after_opening_is_not_seen(hub, open_store):
    store = open_store()
    before = store.read(INDEX)
    open_store(token=hub.token).publish(toy_publication("0.2.0"))
    assert store.read(INDEX) == before
    assert store.read("v1/index.json") is None, "not even a file that was not read before"
    assert [row.version for row in store.catalog()] == ["0.1.0"]
    later = open_store()
    assert later.revision != store.revision
    assert [row.version for row in later.catalog()] == ["0.2.0"]


def test_wheels_elsewhere_are_fetched_by_the_rules_of_web_servers(open_store):
    with pytest.raises(RegistryError, match=f"hf://{NAME} ") as refusal:
        open_store().artifact("http://127.0.0.1:9/x.whl", max_bytes=10)
    assert "http://127.0.0.1:9/x.whl" in str(refusal.value), "plain http is not even tried"
    with pytest.raises(RegistryError, match="--offline"):
        open_store(offline=True).artifact("https://127.0.0.1:9/x.whl", max_bytes=10)


def test_an_older_commit_can_be_named(hub, open_store):
    first = open_store().revision
    open_store(token=hub.token).publish(toy_publication("0.2.0"))
    pinned = open_store(f"hf://{NAME}@{first}")
    assert pinned.revision == first
    assert len(Registry(pinned).releases("acme/toy")) == 1
    with pytest.raises(RegistryError, match=f"pinned to commit {first[:12]}, so nothing can be"):
        pinned.publish(toy_publication("0.3.0"))


def test_a_push_is_one_commit_with_everything_in_it(hub, open_store):
    repository = hub.repositories[NAME]
    publication = toy_publication("0.2.0")
    assert open_store(token=hub.token).publish(publication) is True
    assert repository.messages == ["initial commit", "Publish acme/toy 0.2.0"]
    (_, before), (_, after) = repository.commits
    project = "simple/telescope-env-acme-toy"
    assert {path for path in after if after[path] != before.get(path)} == {
        "artifacts/telescope_env_acme_toy-0.2.0-py3-none-any.whl",
        INDEX,
        "v1/index.json",
        *(f"{folder}/index.{kind}" for folder in ("simple", project) for kind in ("html", "json")),
    }
    (row,) = json.loads(after["v1/index.json"])
    assert (row["id"], row["version"], row["num_releases"]) == ("acme/toy", "0.2.0", 2)
    assert b"0.2.0-py3-none-any.whl" in after[f"{project}/index.html"]
    assert publication.wheel in hub.stored.values(), "a wheel is a large file"
    path, body = hub.posted[-1]
    assert path == "/api/datasets/acme/envs/commit/main"
    header, *lines = [json.loads(line) for line in body.splitlines()]
    assert header["value"]["parentCommit"] == repository.commits[0][0]
    assert {line["key"] for line in lines} == {"file", "lfsFile"}


def test_a_yank_is_one_commit_that_pip_sees_too(hub, open_store):
    open_store(token=hub.token).change_status("acme/toy", lambda _: Status(yanked={"0.1.0": "bad"}))
    _, files = hub.repositories[NAME].commits[-1]
    assert b'data-yanked="bad"' in files["simple/telescope-env-acme-toy/index.html"]
    (row,) = json.loads(files["v1/index.json"])
    assert row["deprecated"].endswith("yanked: bad")


@pytest.mark.slow
def test_a_stale_parent_is_refused_and_the_checks_are_made_again(hub, open_store):
    raced = toy_publication("0.2.0", code="Toy = 'other'\n")
    store, other = open_store(token=hub.token), open_store(token=hub.token)

    def race():
        hub.before_commit = lambda: None
        other.publish(raced)

    hub.before_commit = race
    with pytest.raises(RegistryError, match="already published with different bytes"):
        store.publish(toy_publication("0.2.0"))
    assert Registry(open_store()).releases("acme/toy")[-1] == raced.release
    assert len(hub.repositories[NAME].commits) == 2
    hub.before_commit = lambda: (
        setattr(hub, "before_commit", lambda: None) or other.publish(toy_publication("0.3.0"))
    )
    assert store.publish(toy_publication("0.4.0")) is True
    versions = [release.version for release in Registry(open_store()).releases("acme/toy")]
    assert versions == ["0.1.0", "0.2.0", "0.3.0", "0.4.0"]


@pytest.mark.slow
def test_a_branch_that_never_rests_is_given_up(hub, open_store):
    repository = hub.repositories[NAME]
    hub.before_commit = lambda: repository.add({"other": b""}, f"other {len(repository.commits)}")
    with pytest.raises(RegistryError, match="2 tries"):
        open_store(token=hub.token, max_tries=2).publish(toy_publication("0.2.0"))
    assert sum("/commit/" in path for path, _ in hub.posted) == 2
    assert all(b"0.2.0" not in files[INDEX] for _, files in repository.commits)


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub, open_store):
    store = open_store(token=hub.token)
    store.publish(toy_publication("0.2.0"))
    registry = Registry(open_store(token=hub.token))
    release = resolve(registry, "toy")
    assert registry.wheel_bytes(release) == toy_publication("0.2.0").wheel
    assert hub.tokens_seen() == {f"Bearer {hub.token}"}
    kinds = {line.partition(" ")[0] for line, _ in hub.storage.requests}
    assert kinds >= {"PUT", "GET"}
    assert hub.tokens_seen_by_storage() == set()


def test_a_private_repository_needs_its_token(hub, open_store):
    hub.repositories[NAME].is_private = True
    assert open_store(token=hub.token).read("config.json")
    for token in ("", "hf_wrong"):
        with pytest.raises(RegistryError, match=r"or it is private.*; set the token") as refused:
            open_store(token=token)
        assert "hf_wrong" not in str(refused.value)


def test_a_token_that_may_only_read_publishes_nothing(hub, open_store):
    hub.refuses = True
    with pytest.raises(RegistryError, match="the Hub answered 403, so the token may not do this"):
        open_store(token=hub.token).publish(toy_publication("0.2.0"))
    assert len(hub.repositories[NAME].commits) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://acme/none", "acme/none.* repository"),
        (f"hf://{NAME}@v9", "revision 'v9'"),
    ],
)
def test_what_is_not_there_is_one_message(open_store, tmp_path, text, message):
    with pytest.raises(RegistryError, match=message) as refusal:
        open_store(text)
    assert "\n" not in str(refusal.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_hub_out_of_reach_is_never_replaced_by_the_cache(hub, open_store):
    open_store().read("config.json")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RegistryError) as refusal:
            open_store(endpoint=address)
    assert address in str(refusal.value)


@pytest.mark.parametrize(
    ("variable", "value"), [("ALL_PROXY", "socks9://127.0.0.1:9"), ("SSL_CERT_FILE", "missing.pem")]
)
def test_a_variable_of_the_network_that_cannot_be_used_is_named(
    open_store, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    close_session()  # the next one reads the variables
    with pytest.raises(ConfigError, match=variable):
        open_store()


def test_offline_reads_the_commit_of_last_time_and_says_how_old_it_is(hub, open_store, tmp_path):
    registry = Registry(open_store())
    release = resolve(registry, "toy")
    wheel = registry.wheel_bytes(release)
    (memory,) = (path for path in (tmp_path / "cache/hub").rglob("*") if path.is_file())
    os.utime(memory, (time.time() - 7200, time.time() - 7200))
    asked, told = len(hub.server.requests), []
    offline = Registry(open_store(offline=True, told=told))
    assert offline.releases("acme/toy") == [release]
    assert offline.wheel_bytes(release) == wheel
    assert offline.namespace("acme") is not None
    assert len(hub.server.requests) == asked
    (line,) = told
    assert re.fullmatch(r"hf://acme/envs: offline, as of 2 hours ago \(.* UTC\)", line)
    with pytest.raises(RegistryError, match=r"reserved\.txt was never fetched at"):
        offline.store.read("reserved.txt")
    with pytest.raises(RegistryError, match="is offline, so nothing can be published"):
        offline.store.publish(toy_publication("0.2.0"))
    with pytest.raises(RegistryError, match="was never read, and --offline"):
        open_store(f"hf://{NAME}@v1", offline=True)


def test_a_damaged_wheel_in_the_librarys_cache_is_fetched_again(hub, open_store):
    registry = Registry(open_store())
    release = resolve(registry, "toy")
    wheel = registry.wheel_bytes(release)
    kept = try_to_load_from_cache(
        NAME, release.wheel.urls[0], revision=registry.store.revision, repo_type="dataset"
    )
    Path(kept).write_bytes(b"damaged")
    assert registry.wheel_bytes(release) == wheel


def test_the_library_is_optional_and_named(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "telescope_envs.registry.stores.huggingface")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    opening = Opening(environ={"HOME": str(tmp_path)}, working_directory=tmp_path)
    remedy = "pip install 'telescope-envs[hub]'"
    with pytest.raises(ConfigError) as refusal:
        open_registry("hf://acme/envs", opening)
    assert remedy in str(refusal.value)
