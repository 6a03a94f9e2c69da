"""Code that blocks the event loop for ever ends: at the rollout's deadline, or with Ctrl-C.

And what is slow of Telescope's own does not block it.
"""

import os
import signal
import subprocess
import sys
import threading

import pytest
from tests.asking import ask
from tests.processes import Program
from tests.signals import heed_all_but

from telescope_core import McpServer, SingleTurnEnvironment, StopReason, reward
from telescope_core.chat.http import HttpPool, RequestLimits
from telescope_core.environments.mcp import McpConnection
from telescope_core.errors import TelescopeError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.sandboxes.lookup import open_provider
from telescope_core.sandboxes.protocol import SandboxSpec
from telescope_core.scripted import ScriptedClient


class Spin(SingleTurnEnvironment):
    data = ("a", "b")

    @reward
    async def correct(self, completion):
        print("spinning", flush=True)
        while True:
            pass


@pytest.mark.slow
async def test_an_async_reward_without_an_end_is_interrupted_at_the_deadline():
    before = signal.getsignal(signal.SIGINT)
    for deadline_s in (0.3, 3.0, 30.0):
        client = InProcessEnvironment(Spin.from_settings({}), name="spin")
        rollout = await client.play(ask(deadline_s=deadline_s), ScriptedClient(["x"]).policy("r"))
        await client.close()
        assert rollout.stop_reason is StopReason.TIMEOUT
        assert rollout.error is not None
        if "Spin.correct" in rollout.error:
            break  # The deadline was late enough for the reward to begin on this machine.
    assert "blocked the event loop until the rollout's deadline" in rollout.error
    assert "Spin.correct (tests" in rollout.error
    assert signal.getsignal(signal.SIGINT) == before


SCRIPT = """
import asyncio
import pytest
from tests.asking import ask
from tests.core.environments.test_blocking import Spin
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

client = InProcessEnvironment(Spin.from_settings({}), name="spin")
asyncio.run(client.play(ask(deadline_s=600), ScriptedClient(["x"]).policy("r")))
"""


TAKING = """
from telescope_core.base.interruptible import run
from telescope_core.base.interrupts import taken

with taken():
    run(client.play(ask(deadline_s=600), ScriptedClient(["x"]).policy("r")))
"""


def errors_after(script: str, number: int) -> str:
    """Return what the script wrote to stderr, asked by a signal to end while it spins."""
    with Program(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_all_but,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "spinning\n"
            os.kill(process.pid, number)
            _, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_that_a_program_takes_end_it_as_well(number):
    errors = errors_after(SCRIPT.rpartition("asyncio.run")[0] + TAKING, number)
    assert errors.count("telescope: stopping") == 1
    assert f"interrupted by {signal.Signals(number).name}" in errors.splitlines()[-1]


@pytest.mark.slow
def test_the_first_ctrl_c_ends_it():
    assert "KeyboardInterrupt" in errors_after(SCRIPT, signal.SIGINT)


async def make_request():
    limits = RequestLimits(retry_budget_s=0.0)
    await HttpPool().request("GET", "http://127.0.0.1:1/", headers={}, limits=limits)


async def connect_to_mcp():
    await McpConnection.open(McpServer(command=("true",)))


def starting(provider):
    return lambda: open_provider(provider).start(SandboxSpec())


@pytest.mark.parametrize(
    ("package", "first_use"),
    [
        ("aiohttp", make_request),
        ("mcp", connect_to_mcp),
        ("e2b", starting("e2b")),
        ("prime_sandboxes", starting("prime")),
        ("daytona", starting("daytona")),
        ("modal", starting("modal")),
    ],
)
async def test_slow_packages_are_imported_beside_the_event_loop(package, first_use, monkeypatch):
    threads = []

    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                threads.append(threading.current_thread())
                raise ImportError(f"no {name} here")

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises((ImportError, TelescopeError), match=f"no {package}|needs? .*{package}"):
        await first_use()
    assert threads
    assert threading.main_thread() not in threads
