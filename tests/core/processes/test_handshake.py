"""Who may connect, and what happens to bytes that are no protocol."""

import asyncio
import socket
import struct
import sys
import threading

import msgspec
import pytest
from wire_cases import WireInThisProcess, request

from telescope_core.errors import ConfigError, EnvironmentProcessError, TelescopeError
from telescope_core.processes import ProcessSettings, handshake
from telescope_core.processes.frames import (
    MAX_HELLO_BYTES,
    Beat,
    Connection,
    Health,
    Hello,
    ProtocolError,
    WorkerFrame,
    to_bytes,
)
from telescope_core.processes.handshake import Identity
from telescope_core.processes.launch import scrubbed
from telescope_core.processes.serve import Serving
from telescope_core.scripted import ScriptedClient
from telescope_core.types import RolloutStatus

TOKEN = "a token of the right length"
ECHO = "worker_toys:Echo"


async def test_a_wrong_token_is_refused(wire):
    pool = wire(place=WireInThisProcess(ECHO, token=TOKEN, shown=TOKEN[:-1] + "x"))
    with pytest.raises(ProtocolError, match="the token is wrong"):
        await pool.describe()
    assert (await wire(place=WireInThisProcess(ECHO, token=TOKEN, shown=TOKEN)).describe()).name


async def test_the_token_is_compared_in_constant_time(wire, monkeypatch):
    compared = []

    def compare(one, other):
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(handshake.hmac, "compare_digest", compare)
    await wire(place=WireInThisProcess(ECHO, token=TOKEN, shown=TOKEN)).describe()
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


@pytest.mark.parametrize(
    ("wanted", "facts"),
    [
        (Identity(name="toy", version="2"), ["version 1", "toy", "2"]),
        (Identity(name="other", version="1"), ["'toy'", "'other'"]),
    ],
)
async def test_another_environment_or_version_is_refused(wire, wanted, facts):
    pool = wire(identity=wanted)
    with pytest.raises(ProtocolError) as refused:
        await pool.describe()
    assert all(fact in str(refused.value) for fact in facts), refused.value
    assert pool.stats()["workers"] == 0


async def test_another_protocol_is_refused_with_both_versions(wire, monkeypatch):
    def from_the_future(identity, token):
        return Hello(
            protocol_min=7,
            protocol_max=9,
            core_version="9.1",
            token=token,
            environment="",
            environment_version="",
        )

    monkeypatch.setattr("telescope_core.processes.client.hello", from_the_future)
    with pytest.raises(ProtocolError) as refused:
        await wire().describe()
    assert all(one in str(refused.value) for one in ("7 to 9", "9.1", "1 to 1")), refused.value


async def test_bad_settings_are_told_as_in_process(wire):
    pool = wire()
    pool._settings = {"sizes": 3}
    with pytest.raises(ConfigError, match=r"sizes.*'size'"):
        await pool.play(request(), ScriptedClient(["0"]).policy("r"))


@pytest.fixture
async def raw_worker():
    """A listening worker, and a way to send it bytes; returns what it answers until it hangs up."""
    served = WireInThisProcess(ECHO, token=TOKEN).served
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Serving(served, on_ended=lambda _: None).connection, "127.0.0.1", 0
    )

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    yield send
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack(">I", MAX_HELLO_BYTES + 1) + b"x" * 10,
        struct.pack(">I", 2**32 - 1),
        to_bytes(Health(id=1)),
        struct.pack(">I", 7) + msgspec.msgpack.encode(["nope", 1]),
    ],
    ids=["http", "garbage", "large hello", "huge", "no hello", "unknown kind"],
)
async def test_what_is_no_protocol_ends_the_connection_and_nothing_else(raw_worker, data):
    assert await raw_worker(data) == b""
    reply = await raw_worker(to_bytes(handshake.hello(Identity(name="", version=""), "wrong")))
    assert b"the token is wrong" in reply


async def loose_ends(decoder, on_frame, on_lost):
    ours, theirs = socket.socketpair()
    connection = Connection(decoder, on_frame=on_frame, on_lost=on_lost)
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=theirs)
    ours.setblocking(False)
    return connection, ours


async def test_frames_arrive_whole_however_they_are_cut():
    received, frames = [], [beat(i / 7) for i in range(20)]
    decoder = msgspec.msgpack.Decoder(WorkerFrame)
    connection, ours = await loose_ends(decoder, received.append, lambda why: None)
    data = b"".join(map(to_bytes, frames))
    for cut in (1, 2, 3, 5, 8, 1000):
        received.clear()
        for start in range(0, len(data), cut):
            connection.data_received(data[start : start + cut])
        assert received == frames
    connection.abort("done")
    ours.close()


def beat(lag_s: float) -> Beat:
    return Beat(lag_s=lag_s, blocked_where="x" * 50, memory_bytes=1)


async def test_a_thread_may_send_while_the_loop_stands_still():
    received, decoder = [], msgspec.msgpack.Decoder(WorkerFrame)
    connection, ours = await loose_ends(decoder, received.append, lambda why: None)
    reader, writer = await asyncio.open_connection(sock=ours)
    sender = threading.Thread(target=connection.send_from_thread, args=(beat(1.0),))
    sender.start()
    sender.join()
    connection.send(beat(2.0))
    for expected in (1.0, 2.0):
        length = int.from_bytes(await reader.readexactly(4))
        assert decoder.decode(await reader.readexactly(length)).lag_s == expected
    connection.abort("done")
    writer.close()


async def test_too_large_a_message_fails_alone(wire, monkeypatch):
    monkeypatch.setattr("telescope_core.processes.frames.MAX_FRAME_BYTES", 20_000)
    pool = wire()
    played = await pool.play(request(), ScriptedClient(["x" * 30_000]).policy("r"))
    assert played.status is RolloutStatus.FAILED
    assert "exceeds the 20000 bytes" in played.error
    assert (await pool.play(request(), ScriptedClient(["0"]).policy("r"))).reward == 1.0


def test_a_worker_sees_an_allow_list_and_no_search_path_of_another_interpreter():
    environ = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HF_TOKEN": "x",
        "OPENAI_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "TELESCOPE_WORKER_TOKEN": "x",
        "PYTHONPATH": "/somewhere",
        "VIRTUAL_ENV": "/somewhere",
    }
    assert set(scrubbed(environ, interpreter=sys.executable)) == {
        "PATH",
        "LC_ALL",
        "PYTHONPATH",
        "VIRTUAL_ENV",
    }
    other = scrubbed(environ, interpreter="/there/bin/python")
    assert other == {"PATH": "/there/bin:/bin", "LC_ALL": "C"}


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"num_workers": 0}, ["env_workers", "got 0"]),
        ({"addresses": ("10.0.0.5",)}, ["'10.0.0.5'", "host:port"]),
        ({"addresses": ("a:99999",)}, ["'a:99999'", "host:port"]),
        ({"memory_limit_bytes": 1000}, ["64 MiB", "1000 bytes"]),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, facts):
    with pytest.raises(ConfigError) as refused:
        ProcessSettings(**fields)
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_errors_keep_their_class():
    for kind in ("ConfigError", "EndpointError", "RewardError", "ProtocolError", "IndexError"):
        found = handshake.error_from(kind, "text", otherwise=EnvironmentProcessError)
        assert (type(found).__name__, str(found)) == (kind, "text")
    strange = handshake.error_from("os.system", "text", otherwise=EnvironmentProcessError)
    assert (type(strange), str(strange)) == (EnvironmentProcessError, "os.system: text")
    assert isinstance(strange, TelescopeError)
