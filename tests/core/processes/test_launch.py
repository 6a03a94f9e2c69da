"""Workers that do not start, and hosts that go without a word: nothing of them is left."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from wire_cases import WireInThisProcess

from telescope_core.errors import EnvironmentProcessError, TelescopeError
from telescope_core.processes.launch import LocalPlace


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def place(tmp_path):
    return LocalPlace(
        label="a worker",
        environment="worker_toys:Echo",
        factory="worker_toys:Echo",
        interpreter=sys.executable,
        memory_limit_bytes=None,
        log_path=tmp_path / "output.jsonl",
    )


async def test_a_worker_that_cannot_be_started_keeps_no_descriptor(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    before = num_open_files()
    with pytest.raises(OSError, match="Not a directory"):
        await replace(place, log_path=tmp_path / "file/logs/output.jsonl").start(
            asyncio.Protocol(), silence_s=60
        )
    with pytest.raises(EnvironmentProcessError):
        await replace(place, interpreter="/nowhere/python").start(asyncio.Protocol(), silence_s=60)
    monkeypatch.setenv("TELESCOPE_REGISTRY_TOKEN", "a secret of Telescope's own")
    with pytest.raises(TelescopeError, match="TELESCOPE_REGISTRY_TOKEN"):
        await replace(place, own_variables=("TELESCOPE_REGISTRY_TOKEN",)).start(
            asyncio.Protocol(), silence_s=60
        )
    assert num_open_files() == before


async def test_a_worker_whose_host_is_cancelled_as_it_connects_has_ended(place, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    def spawn(self, socket_fd, guard_fd, output) -> subprocess.Popen[bytes]:
        # It ends when the pipe closes, as a worker does.
        started.append(subprocess.Popen(["cat"], stdin=guard_fd, stdout=output))
        return started[0]

    async def cut(*_, **__):
        raise asyncio.CancelledError

    monkeypatch.setattr(LocalPlace, "_spawn", spawn)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", cut)
    before = num_open_files()
    with pytest.raises(asyncio.CancelledError):
        await place.start(asyncio.Protocol(), silence_s=60)
    assert started[0].returncode is not None
    assert num_open_files() == before


async def test_a_host_that_is_gone_leaves_no_environment(wire):
    """A worker that listens serves the next host, and would keep what it opened for each."""
    place, closed = WireInThisProcess("worker_toys:Echo"), asyncio.Event()
    pool = wire(place=place)
    await pool.describe()
    place.servings[0]._client._environment.on_close(closed.set)
    pool._seats[0].worker._connection.abort("the host is killed")
    await asyncio.wait_for(closed.wait(), 60)
