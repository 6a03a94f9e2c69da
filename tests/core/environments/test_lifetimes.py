"""What environments open ends with them: watches, handlers, processes and connections."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from functools import partial
from itertools import permutations

import psutil
import pytest
from tests.asking import ask

from telescope_core import (
    McpServer,
    SingleTurnEnvironment,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.base.interrupts import NUMBERS
from telescope_core.environments import score_processes, tool_threads
from telescope_core.environments.loop_watch import LoopWatch
from telescope_core.environments.mcp import McpConnection, McpConnections
from telescope_core.environments.running import HoldWatch
from telescope_core.environments.score_processes import ScoreProcesses
from telescope_core.environments.tool_threads import DaemonThreads
from telescope_core.errors import EnvironmentLoadError
from telescope_core.harnesses import AgentEnvironment, CommandHarness
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient


class Quick(SingleTurnEnvironment):
    data = ("a", "b")

    @reward
    def fine(self, completion):
        return 1.0


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def watched() -> InProcessEnvironment:
    client = InProcessEnvironment(Quick(), name="quick", hold_watch=HoldWatch())
    rollout = await client.play(ask(deadline_s=600), ScriptedClient(["x"]).policy("r"))
    assert rollout.reward == 1.0
    return client


def test_a_watch_that_has_ended_keeps_no_memory():
    async def one() -> None:
        await (await watched()).close()

    before = num_open_files()
    for _ in range(3):
        asyncio.run(one())
    for thread in threading.enumerate():
        if thread.name == "hold-watch":
            thread.join(60)
    gc.collect()
    assert num_open_files() == before


async def test_an_environment_is_closed_though_its_watcher_was_killed():
    others = set(psutil.Process().children())
    client, released = await watched(), []
    client._environment.on_close(lambda: released.append("it"))
    (watcher,) = set(psutil.Process().children()) - others
    watcher.kill()
    watcher.wait(60)
    before = num_open_files()
    await client.close()
    assert released == ["it"]
    assert num_open_files() < before


async def test_handlers_of_signals_are_put_back_in_whatever_order_watches_end():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for order in permutations(range(3)):
        watches = [LoopWatch(threshold_s=0.02) for _ in order]
        for watch in watches:
            watch.start()
        for index in order:
            watches[index].stop()
        assert {number: signal.getsignal(number) for number in NUMBERS} == before


class Provider:
    """A provider of sandboxes of which none is made."""

    name = "none"
    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Agents(AgentEnvironment):
    harness = CommandHarness(argv=("true",))
    data = ("a", "b")
    made = Provider()

    def provider(self):
        return self.made

    @reward
    def fine(self, completion):
        return 1.0


async def test_what_fails_to_close_leaves_nothing_else_open():
    def fails() -> None:
        raise OSError("it is gone")

    environment, released = Agents(), []
    environment.on_close(lambda: released.append("first"))
    environment.on_close(fails)
    environment.on_close(lambda: released.append("last"))
    with pytest.raises(OSError, match="it is gone"):
        await environment.close()
    assert released == ["last", "first"]
    assert environment.made.is_closed


class Connected(ToolEnvironment):
    data = ("a", "b")

    @tool
    def add(self, a: int) -> int:
        """Add one.

        Args:
            a: A number.
        """
        return a + 1

    def tools(self):
        return [McpServer(command=("true",))]

    @reward
    def fine(self, completion):
        return 1.0


async def test_connections_are_closed_though_something_else_fails_to(monkeypatch):
    closed: list[McpConnections] = []

    async def close(connections: McpConnections) -> None:
        closed.append(connections)

    def fails() -> None:
        raise OSError("it is gone")

    monkeypatch.setattr(McpConnections, "close", close)
    environment = Connected()
    environment.function_tools()
    environment.on_close(fails)
    with pytest.raises(OSError, match="it is gone"):
        await environment.close()
    assert len(closed) == 1


async def test_of_a_server_that_never_answers_one_error_is_kept(monkeypatch):
    async def fails(server: McpServer) -> McpConnection:
        raise EnvironmentLoadError(f"{server.origin} does not start")

    monkeypatch.setattr(McpConnection, "open", fails)
    connections, found = McpConnections([McpServer(command=("no",))]), []
    for _ in range(3):
        try:
            await connections._shared_connection(0)
        except EnvironmentLoadError as error:
            found.append(weakref.ref(error))
    gc.collect()
    assert sum(one() is not None for one in found) <= 1


async def test_a_thread_keeps_nothing_of_what_it_has_done(monkeypatch):
    monkeypatch.setattr(tool_threads, "_IDLE_S", 60.0)

    class Held:
        pass

    threads, held = DaemonThreads(), Held()
    loop, is_gone = asyncio.get_running_loop(), asyncio.Event()
    weakref.finalize(held, lambda: loop.call_soon_threadsafe(is_gone.set))
    await threads.run(partial(isinstance, held, Held))
    del held
    await asyncio.wait_for(is_gone.wait(), 30)


async def test_a_call_that_is_cancelled_while_its_process_starts_ends_the_process(monkeypatch):
    begun, goes_on, started = threading.Event(), threading.Event(), []

    def spawn(theirs) -> subprocess.Popen[bytes]:
        begun.set()
        with theirs:
            assert goes_on.wait(60)
            started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1))
        return started[0]

    monkeypatch.setattr(score_processes, "_spawn", spawn)
    processes = ScoreProcesses(Quick, None, max_processes=1)
    running = asyncio.create_task(processes.run("fine", ()))
    assert await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    await asyncio.wait([running])
    goes_on.set()
    async with asyncio.timeout(60):
        while not started or started[0].returncode is None:  # noqa: ASYNC110 (processes have none)
            await asyncio.sleep(0.01)
    started[0].stdin.close()
    assert started[0].returncode == -signal.SIGKILL
