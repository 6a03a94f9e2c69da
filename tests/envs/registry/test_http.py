"""A registry on a static host: what is asked for, what is kept, and what offline means."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.static_host import open_store, place_at, static_host

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.catalog import write_catalog
from telescope_envs.registry import Registry, resolve
from telescope_envs.registry.stores.http import ServedStore

PATH = "/index/acme/toy.jsonl"


@pytest.fixture
def folder(tmp_path):
    """A rendered registry with acme/toy 0.1.0."""
    registry = write_registry(tmp_path / "registry")
    registry.store.publish(toy_publication("0.1.0"))
    (tmp_path / "registry/v1").mkdir()
    (tmp_path / "registry/v1/index.json").write_bytes(write_catalog(registry.catalog()))
    return tmp_path / "registry"


@pytest.fixture
def host(folder):
    with static_host(folder) as server:
        yield server


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def entries(cache):
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("has_tags", "has_times"), [(True, False), (False, True)])
def test_a_file_comes_again_only_when_it_has_changed(host, folder, cache, has_tags, has_times):
    host.has_tags, host.has_times = has_tags, has_times
    os.utime(folder / PATH[1:], (2, 2))
    before = open_store(host.address, cache).read(PATH[1:])
    assert open_store(host.address, cache).read(PATH[1:]) == before
    condition = "If-None-Match" if has_tags else "If-Modified-Since"
    assert [condition in headers for _, headers in host.requests] == [False, True]
    (folder / PATH[1:]).write_text("other\n")
    os.utime(folder / PATH[1:], (1, 1))
    assert open_store(host.address, cache).read(PATH[1:]) == b"other\n"


def test_a_file_that_changes_twice_in_one_second_is_noticed(host, folder, cache):
    host.has_tags = False
    now = int(time.time())
    for text in ("one", "two"):
        (folder / PATH[1:]).write_text(text)
        os.utime(folder / PATH[1:], (now, now))
        assert open_store(host.address, cache).read(PATH[1:]) == text.encode()


def test_a_host_without_tags_is_asked_every_time(host, cache):
    host.has_tags = host.has_times = False
    for _ in range(2):
        assert open_store(host.address, cache).read(PATH[1:])
    assert not any(name.startswith("If-") for _, headers in host.requests for name in headers)


def test_what_is_gone_is_not_read_from_the_cache(host, folder, cache):
    assert open_store(host.address, cache).read(PATH[1:])
    (folder / PATH[1:]).unlink()
    assert open_store(host.address, cache).read(PATH[1:]) is None
    assert open_store(host.address, cache, offline=True).read(PATH[1:]) is None


def test_offline_reads_what_was_fetched_and_says_how_old_it_is(host, cache):
    registry = Registry(open_store(host.address, cache))
    release = resolve(registry, "toy")
    wheel = registry.wheel_bytes(release)
    two_days_ago = time.time() - 2 * 86400
    for path in entries(cache):
        os.utime(path, (two_days_ago, two_days_ago))
    asked, told = len(host.requests), []
    offline = Registry(open_store(host.address, cache, offline=True, told=told))
    assert resolve(offline, "toy") == release
    assert offline.wheel_bytes(release) == wheel
    assert len(host.requests) == asked
    (line,) = told
    assert re.fullmatch(f"{host.address}: offline, as of 2 days ago \\(.* UTC\\)", line)


def test_offline_what_was_never_fetched_is_named(host, cache):
    with pytest.raises(RegistryError, match=r"config\.json.* --offline"):
        Registry(open_store(host.address, cache, offline=True))
    assert host.requests == []


def test_why_a_release_was_removed_is_read_and_never_hides_what_is_missing(host, folder, cache):
    wheel = toy_publication("0.2.0").release.wheel
    entry = f'id = "acme/toy"\nversion = "0.2.0"\nsha256 = "{wheel.sha256}"\nreason = "a secret"\n'
    missing = r"has no version '0\.2\.0'; published versions: 0\.1\.0"
    (folder / "removed.toml").write_text(f"[[removed]]\n{entry}")
    for name in ("0.2.0", f"sha256:{wheel.sha256}"):
        with pytest.raises(RegistryError, match=r"; acme/toy 0\.2\.0 is removed: a secret$"):
            resolve(Registry(open_store(host.address, cache)), f"acme/toy@{name}")
    (folder / "removed.toml").write_text("[[removed]]\n")
    with pytest.raises(RegistryError, match=f"{missing}$"):
        resolve(Registry(open_store(host.address, cache)), "acme/toy@0.2.0")
    resolve(Registry(open_store(host.address, cache.with_name("other"))), "acme/toy")
    offline = open_store(host.address, cache.with_name("other"), offline=True)
    with pytest.raises(RegistryError, match=f"{missing}$"):
        resolve(Registry(offline), "acme/toy@0.2.0")


def test_registries_do_not_share_what_is_kept(host, folder, cache, tmp_path):
    write_registry(tmp_path / "other")
    with static_host(tmp_path / "other") as other:
        open_store(host.address, cache).read("config.json")
        with pytest.raises(RegistryError, match="--offline") as refusal:
            open_store(other.address, cache, offline=True).read("config.json")
        assert f"{other.address}/config.json" in str(refusal.value)
        assert other.requests == []


def test_many_at_once_leave_whole_files(host, folder, cache):
    def use(number: int) -> bytes | None:
        (folder / "config.json").write_text(f'{{"name": "test", "n": {number % 2}}}')
        return open_store(host.address, cache).read("config.json")

    with ThreadPoolExecutor(8) as pool:
        read = set(pool.map(use, range(16)))
    assert read <= {b'{"name": "test", "n": 0}', b'{"name": "test", "n": 1}', b""}
    assert len(entries(cache)) == 1
    assert open_store(host.address, cache, offline=True).read("config.json") in read


def test_what_a_killed_process_left_is_swept_away(host, cache):
    open_store(host.address, cache).read("config.json")
    (entry,) = entries(cache)
    old, new = entry.parent / ".part-old", entry.parent / ".part-new"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1, 1))
    open_store(host.address, cache).read("aliases.toml")
    assert (old.exists(), new.exists()) == (False, True)


def test_a_cache_that_cannot_be_written_is_said_and_reading_goes_on(host, tmp_path):
    (tmp_path / "file").write_text("")
    told: list[str] = []
    store = open_store(host.address, tmp_path / "file", told=told)
    assert store.read("config.json")
    assert store.read("aliases.toml")
    (line,) = told
    assert "cannot be written" in line


def test_a_host_in_trouble_is_asked_again(host, cache):
    answers = [503, 429, 200]

    def troubled(handler):
        status = answers.pop(0)
        return handler.serve_file() if status == 200 else handler.answer(status)

    host.faults[PATH] = troubled
    assert open_store(host.address, cache).read(PATH[1:])
    assert answers == []


@pytest.mark.parametrize("is_date", [False, True], ids=["seconds", "date"])
def test_a_wait_that_is_too_long_is_an_error_now(host, cache, is_date):
    # A date is a while in the future when the answer is read, however busy the machine is.
    when = formatdate(time.time() + 3600, usegmt=True) if is_date else "3600"
    host.faults[PATH] = lambda handler: handler.answer(429, Retry_After=when)
    with pytest.raises(RegistryError, match=r"429 and asks to wait 3\d\d\d s \(1 try\)"):
        open_store(host.address, cache).read(PATH[1:])
    assert len(host.requests) == 1


def test_a_short_wait_is_waited(host, cache, monkeypatch):
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)
    monkeypatch.setattr("telescope_envs.registry.fetch.time", clock)
    answers = [503, 200]

    def busy(handler):
        if answers.pop(0) == 503:
            return handler.answer(503, Retry_After="7")
        return handler.serve_file()

    host.faults[PATH] = busy
    assert open_store(host.address, cache).read(PATH[1:])
    assert pauses == [7.0]


@pytest.mark.parametrize("status", [400, 500, 418])
def test_other_answers_are_errors_at_once(host, cache, status):
    host.faults[PATH] = lambda handler: handler.answer(status)
    with pytest.raises(RegistryError, match=f"toy.jsonl answered {status}; expected 200 or 404"):
        open_store(host.address, cache).read(PATH[1:])
    assert len(host.requests) == 1


def test_a_registry_that_was_not_rendered_says_what_to_run(host, folder, cache):
    (folder / "v1/index.json").unlink()
    remedy = "telescope hub render"
    with pytest.raises(RegistryError) as refusal:
        open_store(host.address, cache).catalog()
    assert remedy in str(refusal.value)


def test_redirects_are_followed_and_counted(host, cache):
    def hop(number: int):
        return lambda handler: handler.answer(302, Location=f"/hop/{number + 1}")

    host.faults = {f"/hop/{n}": hop(n) for n in range(1, 5)}
    host.faults["/config.json"] = hop(0)
    host.faults["/hop/5"] = lambda handler: handler.answer(200, b"there")
    assert open_store(host.address, cache).read("config.json") == b"there"
    host.faults["/hop/5"] = hop(5)
    with pytest.raises(RegistryError, match="more than 5 redirects"):
        open_store(host.address, cache).read("config.json")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": "acme is\\n suspended", "what_to_do": "ask \\u001b[2J"}', r"ask \u001b[2J"),
        (b'{"error": "%s", "what_to_do": "ask"}' % (b"x" * 9000), "characters left out"),
        (b'{"error": "%s", "what_to_do": "ask"}' % (b"x" * 90_000), "set the token"),
        (b'{"error": 1, "what_to_do": "ask"}', "set the token"),
        (b'{"error": "\xff", "what_to_do": "ask"}', "set the token"),
        (b"[" * 9000, "set the token"),
        (b"<html>", "set the token"),
    ],
)
def test_the_reason_of_a_refusal_is_shown_if_the_server_gives_one(host, cache, body, shown):
    host.faults["/config.json"] = lambda handler: handler.answer(403, body)
    with pytest.raises(RegistryError) as refusal:
        open_store(host.address, cache, token="planted").read("config.json")
    assert shown in str(refusal.value)
    assert ("the token was not accepted" in str(refusal.value)) is (shown == "set the token")
    assert len(str(refusal.value)) < 800
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("status", [400, 421, 429, 451, 500, 503])
def test_what_the_registry_says_of_any_failure_is_shown(host, cache, status):
    body = b'{"error": "it is\\n busy", "what_to_do": "wait \\u001b[2J"}'
    host.faults["/config.json"] = lambda handler: handler.answer(status, body)
    with pytest.raises(RegistryError) as refusal:
        open_store(host.address, cache).read("config.json")
    said = str(refusal.value)
    assert f"answered {status}" in said
    assert said.endswith(r": it is busy; wait \u001b[2J")


def test_what_another_host_says_of_its_failure_is_not_advice(host, cache, folder):
    body = b'{"error": "broken", "what_to_do": "run a program"}'
    with static_host(folder) as other:
        other.faults["/x.whl"] = lambda handler: handler.answer(500, body)
        with pytest.raises(RegistryError, match="answered 500") as refusal:
            open_store(host.address, cache).artifact(f"{other.address}/x.whl", max_bytes=10)
    assert "run a program" not in str(refusal.value)


@pytest.mark.parametrize(
    ("status", "body", "shown"),
    [
        (413, b"<html>", r"wheel has \d\d+ bytes; .* proxy"),
        (413, b'{"error": "too long", "what_to_do": "split it"}', r"too long; split it$"),
        (502, b"<html>", "may have published .* safe to publish the same release twice"),
        (503, b'{"error": "full", "what_to_do": "wait"}', "full; wait$"),
        (504, b"", "may have published .* safe to publish the same release twice"),
        (500, b"", "500 Internal Server Error; check the address"),
    ],
)
def test_what_a_proxy_answers_to_a_release_is_explained(cache, monkeypatch, status, body, shown):
    def client(*_args, **_options) -> httpx.Client:
        answer = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
        return httpx.Client(transport=answer, base_url="https://hub.test/")

    monkeypatch.setattr("telescope_envs.registry.stores.http.new_client", client)
    store = ServedStore(place_at("https://hub.test", cache, token="planted"), "v1")
    with closing(store), pytest.raises(RegistryError, match=shown):
        store.publish(toy_publication("0.1.0"))


def test_a_place_that_asks_for_a_token_says_how_to_give_one(host, cache):
    host.faults["/config.json"] = lambda handler: handler.answer(401)
    # "set the token" is the hint that the store was opened with.
    with pytest.raises(RegistryError, match=r"requires .*; set the token"):
        open_store(host.address, cache).read("config.json")
    with pytest.raises(RegistryError, match="accepted; set the token") as refusal:
        open_store(host.address, cache, token="planted").read("config.json")
    assert "planted" not in str(refusal.value)
    assert host.tokens_seen() == {"Bearer planted"}
    assert entries(cache) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks9://127.0.0.1:9"),
        ("HTTPS_PROXY", "http://[::1"),
        ("SSL_CERT_FILE", "missing.pem"),
        ("SSL_CERT_FILE", __file__),
    ],
)
def test_a_variable_of_the_network_that_cannot_be_used_is_named(
    cache, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    address = "https://127.0.0.1:9"
    with pytest.raises(ConfigError, match=variable):
        open_store(address, cache).read("config.json")
    with pytest.raises(ConfigError, match=variable):
        ServedStore(place_at(address, cache), "v1").publish(toy_publication("0.1.0"))


def test_a_time_without_a_zone_is_no_condition_and_no_fault(host, cache):
    def answer(handler):
        handler.answer(200, b"text", **{"Last-Modified": "Mon, 05 Jan 2026 10:00:00"})

    host.faults[PATH] = answer
    for _ in range(2):
        assert open_store(host.address, cache).read(PATH[1:]) == b"text"
    assert not any("If-Modified-Since" in headers for _, headers in host.requests)
