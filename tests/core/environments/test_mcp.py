"""MCP servers as tool sources: real ones, on stdio and over HTTP, and what becomes of them."""

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.asking import ask
from tests.core.pictures import png
from tests.ports import free_port

from telescope_core import (
    Example,
    ListSource,
    McpServer,
    RolloutStatus,
    ToolConfig,
    ToolEnvironment,
    reward,
)
from telescope_core.images import image_of
from telescope_core.in_process import InProcessEnvironment
from telescope_core.open import open_environment
from telescope_core.processes.settings import ProcessSettings
from telescope_core.scripted import ScriptedClient

pytestmark = pytest.mark.slow
PROGRAM = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))


PNG = image_of(png(255))
NOBODY = f"http://127.0.0.1:{free_port()}/mcp"
"""An address where nothing listens."""


def upper(text: str) -> str:
    """Write in capitals."""
    return text.upper()


class Remote(ToolEnvironment):
    class Config(ToolConfig):
        tool_timeout_s: float = 60.0

    servers = (McpServer(command=PROGRAM),)

    def tools(self):
        return [upper, *self.servers]

    def examples(self, split):
        return ListSource([Example(id=f"{split}", prompt="Do something.")])

    @reward
    def done(self, rollout, example):
        return float(rollout.completion_text == "done")


def environment_with(*servers, **settings):
    chosen = type("Chosen", (Remote,), {"servers": servers})
    return InProcessEnvironment(chosen.from_settings(settings), name="remote")


def tag(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(client, *replies, index=0):
    request = ask(index=index, deadline_s=300)
    return await client.play(request, ScriptedClient([*replies, "done"]).policy("r"))


def responses(rollout):
    texts = [message.content for message in rollout.messages if message.role == "user"]
    pattern = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
    return [found for text in texts for found in pattern.findall(text)]


async def eventually(condition):
    while not condition():  # noqa: ASYNC110 - a process of the system, which no event announces
        await asyncio.sleep(0.01)


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().split()[3])


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = set(children())
    yield
    assert set(children()) <= before


@pytest.fixture(scope="module")
def address():
    port = free_port()
    process = subprocess.Popen([*PROGRAM, str(port)])
    try:
        give_up_s = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=60).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < give_up_s
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


async def test_a_program_on_stdio(monkeypatch):
    monkeypatch.setenv("SECRET", "not for servers")
    client = environment_with(McpServer(command=PROGRAM, environ={"GIVEN": "yes"}))
    try:
        turn = f"{tag('add', a=2, b=3)}{tag('upper', text='a')}{tag('who')}"
        rollout = await play(client, turn, tag("add", a="x"))
        assert '"name": "add"' in rollout.messages[0].content
        assert '"description": "Add two numbers."' in rollout.messages[0].content
        five, capital, who, wrong = responses(rollout)
        assert (five, capital) == ("5", "A")
        assert json.loads(who)["given"] == "yes"
        assert json.loads(who)["secret"] == ""
        assert wrong.startswith("error: ")
        assert rollout.metrics["tool_calls/add"] == 2
        assert rollout.metrics["tool_errors/refused"] == 1
        assert rollout.reward == 1.0
        unseen = responses(await play(client, tag("scan"), index=5))
        kinds = ["resource: application/pdf", "resource: no type given", "image: image/png"]
        assert unseen == ["\n".join(f"({kind})" for kind in kinds)]
        later = await play(client, f"{tag('note', text='a')}", index=1)
        again = await play(client, f"{tag('note', text='b')}{tag('who')}", index=2)
        assert responses(later) + responses(again)[:1] == ["a", "a b"], "rollouts share it"
        assert json.loads(responses(again)[1])["pid"] == json.loads(who)["pid"]
        dead = await play(client, tag("die"), index=3)
        assert dead.status is RolloutStatus.FAILED
        assert "ProcessDiedError: MCP server" in dead.error
        assert "last words" in dead.error
        other = await play(client, f"{tag('note', text='c')}{tag('who')}", index=4)
        assert responses(other)[0] == "c", "the next rollout gets a new one"
        # It also does where the server has ended while no rollout called it.
        pid = int(json.loads(responses(other)[1])["pid"])
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            await eventually(lambda: not Path(f"/proc/{pid}").exists())
        for _ in range(20):
            await asyncio.sleep(0)  # The end of its output is handed on from task to task.
        after = await play(client, f"{tag('note', text='d')}", index=6)
        assert (after.error, responses(after)) == (None, ["d"])
    finally:
        await client.close()


async def test_pictures_in_results_are_named_or_given_to_the_policy(address, monkeypatch):
    call = tag("look", picture=PNG.data)
    named = await play(environment_with(McpServer(url=address)), call)
    assert responses(named) == ["before\n(image: image/png)\nafter\n(image: image/png)"]
    seeing = environment_with(McpServer(url=address, images=True))
    rollout = await play(seeing, call)
    (message,) = [one for one in rollout.messages if one.images]
    assert [replace(one, at=0) for one in message.images] == [PNG]
    before, after = message.content[: message.images[0].at], message.content[message.images[0].at :]
    assert before.endswith("before\n")
    assert after.startswith("\nafter\n(image: image/png)")


async def test_connections_of_many_rollouts_read_the_certificates_once(address, monkeypatch):
    reads, new = [], ssl.create_default_context
    monkeypatch.setattr(
        ssl, "create_default_context", lambda *given, **how: reads.append(how) or new(*given, **how)
    )
    client = environment_with(McpServer(url=address, per_rollout=True))
    for index in range(3):
        rollout = await client.play(ask(index=index), ScriptedClient(["no call"]).policy("r"))
        assert rollout.error is None
    await client.close()
    assert len(reads) <= 1


async def test_a_server_per_rollout_keeps_state_apart_and_ends_with_it():
    client = environment_with(McpServer(command=PROGRAM, per_rollout=True, only=("note",)))
    turns = (tag("note", text="a"), tag("note", text="b"))
    rollouts = await asyncio.gather(*(play(client, *turns, index=index) for index in range(2)))
    assert [responses(rollout) for rollout in rollouts] == [["a", "a b"], ["a", "a b"]]
    assert '"name": "add"' not in rollouts[0].messages[0].content


async def test_a_cancelled_rollout_ends_its_server():
    client = environment_with(McpServer(command=PROGRAM, per_rollout=True))
    before = set(children())
    playing = asyncio.create_task(play(client, tag("hang")))
    async with asyncio.timeout(120):
        await eventually(lambda: set(children()) - before)
        await client.cancel("g/0")
        rollout = await playing
    assert rollout.status is RolloutStatus.CANCELLED
    assert set(children()) <= before


async def test_a_killed_environment_process_takes_its_server_along(tmp_path, monkeypatch):
    (tmp_path / "remote_environment.py").write_text(
        "from telescope_core import Example, ListSource, McpServer, ToolEnvironment, reward\n"
        "class Remote(ToolEnvironment):\n"
        f"    def tools(self): return [McpServer(command={PROGRAM!r})]\n"
        "    def examples(self, split): return ListSource([Example(id=split, prompt='?')])\n"
        "    @reward\n"
        "    def nothing(self): return 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    settings = ProcessSettings(isolation="process")
    client = open_environment("remote_environment:Remote", {}, settings)
    try:
        rollout = await play(client, tag("who"))
        pid = int(json.loads(responses(rollout)[0])["pid"])
        worker = parent_of(pid)
        assert worker != os.getpid()
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(120):
            await eventually(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        await client.close()


async def test_an_address_with_headers(address):
    server = McpServer(url=address, headers={"Authorization": "Bearer x"}, prefix="far_")
    client = environment_with(server)
    try:
        rollout = await play(client, f"{tag('far_add', a=2, b=3)}{tag('far_authorization')}")
        assert responses(rollout) == ["5", "Bearer x"]
        many = await asyncio.gather(
            *(play(client, tag("far_add", a=index, b=0), index=index) for index in range(8))
        )
        assert [responses(rollout) for rollout in many] == [[str(n)] for n in range(8)]
    finally:
        await client.close()


async def test_a_call_that_hangs_far_away_ends_at_its_limit(address):
    client = environment_with(McpServer(url=address), tool_timeout_s=0.5)
    try:
        rollout = await play(client, tag("hang"))
        [said] = responses(rollout)
        assert said.startswith("error: hang ")
        assert "0.5 s" in said
        assert rollout.metrics["tool_errors/timed_out"] == 1
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (McpServer(command=("no-such-program",)), "FileNotFoundError"),
        (McpServer(command=(sys.executable, "-c", "print(1/0)")), "ZeroDivisionError"),
        (McpServer(command=("sleep", "100"), startup_timeout_s=0.3), "0.3 s"),
        (McpServer(url=NOBODY, startup_timeout_s=0.3), f"MCP server {NOBODY} "),
    ],
    ids=["no program", "breaks", "says nothing", "nobody listens"],
)
async def test_what_does_not_start_says_why(server, problem):
    client = environment_with(server)
    rollout = await play(client)
    await client.close()
    assert rollout.status is RolloutStatus.FAILED
    assert problem in rollout.error


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_numbers_that_would_arrive_as_null_are_refused(address, number):
    client = environment_with(McpServer(url=address))
    call = f'{{"name": "note", "arguments": {{"text": "x", "more": [{number}]}}}}'
    try:
        rollout = await play(client, f"<tool_call>{call}</tool_call>")
    finally:
        await client.close()
    (said,) = responses(rollout)
    assert "the arguments of note hold NaN or a number beyond 64 bits" in said
    assert rollout.status is RolloutStatus.KEPT


async def test_a_tool_that_the_server_does_not_have_names_the_nearest(address):
    client = environment_with(McpServer(url=address, only=("ad",)))
    rollout = await play(client)
    await client.close()
    assert rollout.status is RolloutStatus.FAILED
    assert "'ad'" in rollout.error
    assert "'add'" in rollout.error
