"""What lies in the cache is believed only when it is what was fetched, for that very address."""

import subprocess
import sys
from functools import partial

import msgspec
import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.static_host import open_store, static_host
from tests.processes import Program

from telescope_core.errors import RegistryError
from telescope_envs.install.attestations import attestation_of
from telescope_envs.records.files import sha256_of
from telescope_envs.records.reading import attestation_path, check_bytes
from telescope_envs.registry import Registry
from telescope_envs.registry.http_cache import CachedFile, HttpCache


@pytest.fixture
def host(tmp_path):
    write_registry(tmp_path / "registry").store.publish(toy_publication("0.1.0"))
    with static_host(tmp_path / "registry") as server:
        yield server


def only_entry(cache):
    (path,) = (path for path in cache.rglob("*") if path.is_file())
    return path


def poisoned(data: bytes) -> dict[str, bytes]:
    head, _, body = data.partition(b"\n")
    other = {**msgspec.json.decode(head), "url": "http://127.0.0.1:1/config.json"}
    longer = {**msgspec.json.decode(head), "size": 10**12}
    return {
        "other bytes": head + b"\n" + body.replace(b"test", b"evil"),
        "half written": data[: len(data) // 2],
        "empty": b"",
        "of another address": msgspec.json.encode(other) + b"\n" + body,
        "of another length": msgspec.json.encode(longer) + b"\n" + body,
        "no entry": b"\xff\xfe\n\n",
    }


@pytest.mark.parametrize("kind", poisoned(b'{"url": ""}\n'))
def test_a_poisoned_entry_counts_for_nothing(host, tmp_path, kind):
    cache = tmp_path / "cache"
    fetched = open_store(host.address, cache).read("config.json")
    path = only_entry(cache)
    path.write_bytes(poisoned(path.read_bytes())[kind])
    with pytest.raises(RegistryError, match="was never fetched"):
        open_store(host.address, cache, offline=True).read("config.json")
    assert open_store(host.address, cache).read("config.json") == fetched
    assert "If-None-Match" not in host.requests[-1][1]
    assert open_store(host.address, cache, offline=True).read("config.json") == fetched


def test_a_stale_entry_is_replaced_by_what_is_there_now(host, tmp_path):
    cache = tmp_path / "cache"
    before = Registry(open_store(host.address, cache)).releases("acme/toy")
    Registry.at(tmp_path / "registry").store.publish(toy_publication("0.2.0"))
    after = Registry(open_store(host.address, cache)).releases("acme/toy")
    assert [len(before), len(after)] == [1, 2]


def test_a_wheel_changed_on_the_way_does_not_stay(host, tmp_path):
    cache = tmp_path / "cache"
    (release,) = Registry(open_store(host.address, cache)).releases("acme/toy")
    path = f"/{release.wheel.urls[0]}"
    host.faults[path] = lambda handler: handler.answer(200, b"evil", ETag='"evil"')
    with pytest.raises(RegistryError, match=r"expected .* bytes"):
        check_bytes(Registry(open_store(host.address, cache)).wheel_bytes(release), release)
    host.faults.clear()
    check_bytes(Registry(open_store(host.address, cache)).wheel_bytes(release), release)


@pytest.mark.parametrize("kind", ["wheel", "attestation"])
def test_one_damaged_answer_is_not_the_answer_for_good(host, tmp_path, kind):
    """It comes with the tag of the whole file, for which the host then answers 304."""
    publication = toy_publication("0.1.0")
    url = publication.release.wheel.urls[0]
    release, whole = publication.release, publication.wheel
    if kind == "attestation":
        url, whole = attestation_path(url), b"{}"
        release = release.changed(attestation_sha256=sha256_of(whole))
        (host.folder / url).write_bytes(whole)

    def fetched(**how) -> bytes | None:
        registry = Registry(open_store(host.address, tmp_path / "cache", **how))
        read = registry.wheel_bytes if kind == "wheel" else partial(attestation_of, registry)
        return read(release)

    tag = f'"{sha256_of(whole)[:16]}"'
    host.faults[f"/{url}"] = lambda handler: handler.answer(200, b"damaged", ETag=tag)
    assert fetched() == b"damaged"
    with pytest.raises(RegistryError, match="was never fetched"):
        fetched(offline=True)
    host.faults.clear()
    # What an earlier version kept without looking is not used either.
    cached = HttpCache(tmp_path / "cache" / "http", host.address, print)
    cached.put(f"{host.address}/{url}", CachedFile(status=200, body=b"damaged", etag=tag))
    assert fetched() == whole
    assert "If-None-Match" not in host.requests[-1][1]
    assert fetched() == whole
    assert "If-None-Match" in host.requests[-1][1], "what was checked is kept"


WRITER = """
import sys, time
from pathlib import Path
from telescope_envs.registry.http_cache import (
    CachedFile,
    HttpCache,
)

cache = HttpCache(Path(sys.argv[1]), "http://a", print)
for number in range(10**6):
    body = bytes([number % 256]) * 3_000_000
    cache.put("http://a/x", CachedFile(
        status=200, body=body, etag="", last_modified="", confirmed_at=time.time()
    ))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_entry(tmp_path):
    for num_written in (1, 3, 4):
        with Program(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            for _ in range(num_written):
                writer.stdout.readline()
            writer.kill()
        found = HttpCache(tmp_path, "http://a", print).get("http://a/x", max_bytes=10**7)
        assert found is not None
        assert len(found.body) == 3_000_000
        assert len(set(found.body)) == 1
