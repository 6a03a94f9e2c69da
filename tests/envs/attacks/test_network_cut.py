"""The network is cut in every phase, or never ends: one message with the address, no trace."""

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.envs.projects import write_registry
from tests.envs.static_host import open_store, static_host

from telescope_core.errors import RegistryError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def host(tmp_path):
    write_registry(tmp_path / "registry")
    with static_host(tmp_path / "registry") as server:
        yield server


def refused(host, tmp_path, message: str) -> None:
    """Reading as a file and as an artefact raises `message`, and nothing is kept."""
    store = open_store(host.address, tmp_path / "cache")
    with pytest.raises(RegistryError, match=message) as first:
        store.read("config.json")
    assert f"{host.address}/config.json" in str(first.value)
    with pytest.raises(RegistryError, match=message):
        store.artifact("config.json", max_bytes=1_000_000)
    assert kept_in(tmp_path / "cache") == []


def kept_in(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "without sending a response"),
        (HEAD, "[Dd]isconnected|without sending"),
        (HEAD + b"\r\n" + b"x" * 50, "incomplete|without sending complete"),
        (CHUNKED + b"5\r\nhel", "incomplete"),
        (b"\x00\x01\x02 nonsense\r\n\r\n", "[Ii]llegal|[Ii]nvalid|without sending"),
    ],
    ids=["before headers", "in the headers", "short body", "in a chunk", "not http"],
)
def test_a_cut_is_one_message_that_names_the_address(host, tmp_path, sent, message):
    host.faults["/config.json"] = lambda handler: handler.cut(sent)
    refused(host, tmp_path, f"({message}).*3 tries.*check the address and the network")


def test_a_cut_that_heals_is_not_noticed(host, tmp_path):
    cuts = [b"", HEAD + b"\r\nxxx"]
    host.faults["/config.json"] = lambda handler: (
        handler.cut(cuts.pop()) if cuts else handler.serve_file()
    )
    assert open_store(host.address, tmp_path / "cache").read("config.json").startswith(b"{")


def test_nobody_there_is_one_message(tmp_path):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RegistryError, match=r"refused.*3 tries") as refusal:
            open_store(address, tmp_path / "cache").read("config.json")
    assert f"{address}/config.json" in str(refusal.value)
    assert kept_in(tmp_path / "cache") == []


def test_a_cut_keeps_what_was_known_before(host, tmp_path):
    before = open_store(host.address, tmp_path / "cache").read("config.json")
    host.faults["/config.json"] = lambda handler: handler.cut(HEAD + b"\r\nxxx")
    with pytest.raises(RegistryError):
        open_store(host.address, tmp_path / "cache").read("config.json")
    offline = open_store(host.address, tmp_path / "cache", offline=True)
    assert offline.read("config.json") == before


def endless_chunks(handler) -> None:
    handler.wfile.write(CHUNKED)
    while True:
        handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def test_endless_bytes_are_cut_at_the_limit(host, tmp_path):
    host.faults["/config.json"] = endless_chunks
    with pytest.raises(RegistryError, match=r"config\.json: longer than 1000000 bytes"):
        open_store(host.address, tmp_path / "cache").artifact("config.json", max_bytes=1_000_000)
    assert len(host.requests) == 1, "what is too long is not asked for again"


def test_an_announced_length_is_refused_before_it_is_read(host, tmp_path):
    host.faults["/config.json"] = lambda handler: handler.cut(
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
    )
    with pytest.raises(RegistryError, match="longer than"):
        open_store(host.address, tmp_path / "cache").read("config.json")


def test_packed_bytes_are_refused(host, tmp_path):
    host.faults["/config.json"] = lambda handler: handler.answer(
        200, b"\x1f\x8b", Content_Encoding="gzip"
    )
    with pytest.raises(RegistryError, match="gzip") as refusal:
        open_store(host.address, tmp_path / "cache").read("config.json")
    assert f"{host.address}/config.json" in str(refusal.value)
    assert kept_in(tmp_path / "cache") == []


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\nX-", HEAD + b"\r\n"], ids=["head", "body"])
def test_a_trickle_ends_with_the_time_for_all(host, tmp_path, sent):
    def trickle(handler) -> None:
        handler.wfile.write(sent)
        for _ in range(40):
            handler.wfile.write(b"x")
            time.sleep(0.1)

    host.faults["/config.json"] = trickle
    with pytest.raises(RegistryError, match=r"config\.json: not finished within 0\.25 s"):
        open_store(host.address, tmp_path / "cache", total_s=0.25).read("config.json")
    assert kept_in(tmp_path / "cache") == []


@pytest.mark.slow
def test_silence_ends(host, tmp_path):
    host.faults["/config.json"] = lambda handler: time.sleep(1.0)
    with pytest.raises(RegistryError, match=r"0\.1 s"):
        open_store(host.address, tmp_path / "cache", silence_s=0.1).read("config.json")
    assert kept_in(tmp_path / "cache") == []
