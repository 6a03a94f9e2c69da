"""A worker may take any time to load as long as it shows work; the time is virtual."""

import asyncio
import socket
import threading

import msgspec
import pytest

from telescope_core.base.protocols import PROTOCOL_MAX
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import EnvironmentProcessError
from telescope_core.processes.client import WorkerClient
from telescope_core.processes.frames import (
    LENGTH_BYTES,
    Beat,
    FetchExample,
    Reply,
    Welcome,
    WorkerFrame,
)
from telescope_core.processes.handshake import Agreement, Identity
from telescope_core.processes.launch import RemotePlace, RemoteWorker
from telescope_core.processes.replies import read_nothing
from telescope_core.processes.settings import StageDeadlines
from telescope_core.processes.watch import beating, io_bytes
from telescope_core.types import Split
from telescope_train.simulation.virtual_time import run_in_virtual_time

LOAD_S = 100.0
MEBIBYTE = 2**20


class Wire(asyncio.Transport):
    """A connection that takes everything and says nothing."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol, self.is_closed = protocol, False

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high=None, low=None) -> None:
        """Do nothing."""

    def write(self, data) -> None:
        """Do nothing."""

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.protocol.connection_lost(None)


class Place:
    """Where a worker runs that only beats."""

    label, token, gets_secrets = "the worker", "", False

    async def start(self, protocol: asyncio.Protocol, *, silence_s: float) -> "Place":
        protocol.connection_made(Wire(protocol))
        return self

    def kill(self) -> None:
        """Do nothing."""

    async def epitaph(self) -> str:
        return "it is gone"


class Elsewhere(RemotePlace):
    """An address at which something takes connections and says nothing."""

    async def start(self, protocol: asyncio.Protocol, *, silence_s: float) -> RemoteWorker:
        protocol.connection_made(Wire(protocol))
        return RemoteWorker(self.address)


def beat(memory_bytes: int, io: int) -> Beat:
    return Beat(memory_bytes=memory_bytes, io_bytes=io)


async def beats(worker: WorkerClient, seconds: float, *, memory: int = 0, io: int = 0) -> None:
    """Let twice as many beats arrive; each shows so much more memory and so many more bytes."""
    before = worker.last_beat or beat(50 * MEBIBYTE, 10_000)
    for number in range(1, int(2 * seconds) + 1):
        await asyncio.sleep(0.5)
        worker._on_frame(beat(before.memory_bytes + number * memory, before.io_bytes + number * io))


def welcome(worker: WorkerClient) -> None:
    worker._on_frame(
        Welcome(
            protocol=PROTOCOL_MAX,
            core_version="1",
            environment="slow",
            environment_version="1",
            pid=7,
            secrets=(),
            has_group_rewards=False,
        )
    )


def starting(main, place=None):
    """Run `main` with a worker and the task that waits until it has started and loaded."""

    async def run() -> None:
        deadlines = StageDeadlines(start_s=LOAD_S, load_s=LOAD_S)
        agreement = Agreement(Identity(name="slow", version="1"), ())
        worker = WorkerClient(place or Place(), agreement, deadlines)
        opening = asyncio.create_task(worker.start({}))
        await asyncio.sleep(0.01)
        await main(worker, opening)

    run_in_virtual_time(run)


def loading(main):
    """Run `main` with a worker that has greeted and loads."""

    async def greeted(worker, opening) -> None:
        welcome(worker)
        await asyncio.sleep(0.01)
        await main(worker, opening)

    starting(greeted)


def test_a_worker_may_import_for_any_time_and_is_ended_when_it_stops():
    async def main(worker, opening):
        await beats(worker, 5 * LOAD_S, io=5000)
        assert not opening.done()
        await beats(worker, LOAD_S + 1)
        with pytest.raises(EnvironmentProcessError, match="greeting, and showed no work for 100 s"):
            await opening

    starting(main)


def test_one_that_has_shown_no_work_is_not_said_to_work():
    async def main(worker, opening):
        told: list[str] = []
        with showing_troubles(told.append):
            await asyncio.sleep(LOAD_S + 1)
        with pytest.raises(EnvironmentProcessError, match="showed no work for 100 s"):
            await opening
        assert told == []

    starting(main)


def test_what_listens_elsewhere_and_does_not_greet_is_no_worker():
    async def main(worker, opening):
        await asyncio.sleep(StageDeadlines().greeting_s - 0.1)
        assert not opening.done()
        await asyncio.sleep(0.2)
        with pytest.raises(EnvironmentProcessError, match="within 10 s: what listens there does"):
            await opening

    starting(main, Elsewhere(label="the worker", address="10.0.0.5:22", token=""))


@pytest.mark.parametrize("work", [{"memory": 2 * MEBIBYTE}, {"io": 5000}], ids=["keeps", "reads"])
def test_a_worker_that_shows_work_may_load_for_any_time(work):
    async def main(worker, opening):
        told: list[str] = []
        with showing_troubles(told.append):
            await beats(worker, 5 * LOAD_S, **work)
        assert not opening.done()
        assert len(told) >= 2
        assert "has worked on open for" in told[0]
        worker._on_frame(Reply(id=0, value=msgspec.Raw(msgspec.msgpack.encode(None))))
        await opening

    loading(main)


@pytest.mark.parametrize("idle", [{}, {"io": 500}], ids=["computes or waits", "beats"])
def test_one_that_shows_none_is_ended(idle):
    async def main(worker, opening):
        await beats(worker, LOAD_S / 2, io=5000)
        await beats(worker, LOAD_S - 1, **idle)
        assert not opening.done()
        await beats(worker, 3, **idle)
        with pytest.raises(EnvironmentProcessError, match="open and was idle for 100 s in it"):
            await opening

    loading(main)


def test_work_for_others_is_no_sign():
    async def main(worker, opening):
        worker._on_frame(Reply(id=0, value=msgspec.Raw(msgspec.msgpack.encode(None))))
        await opening
        asked = [
            asyncio.create_task(
                worker.ask(
                    FetchExample(split=Split.TRAIN, index=0),
                    read_nothing,
                    within_s=LOAD_S,
                    shows_work=True,
                )
            )
            for _ in range(2)
        ]
        await beats(worker, LOAD_S + 1, io=10**6)
        for one in asked:
            with pytest.raises(EnvironmentProcessError):
                await one

    loading(main)


@pytest.mark.slow
def test_a_process_that_imports_beats_on_its_socket():
    host, own = socket.socketpair()
    with host, own:
        with beating(own.fileno()):
            received = host.recv(4096)
        frame = msgspec.msgpack.decode(received[LENGTH_BYTES:], type=WorkerFrame)
        assert isinstance(frame, Beat)
        assert frame.memory_bytes > MEBIBYTE
        assert [one.name for one in threading.enumerate() if "beats" in one.name] == []


def test_what_a_process_reads_is_counted(tmp_path):
    before = io_bytes()
    (tmp_path / "data").write_bytes(bytes(MEBIBYTE))
    (tmp_path / "data").read_bytes()
    assert io_bytes() - before >= 2 * MEBIBYTE
