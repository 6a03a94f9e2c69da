"""What an OpenEnv server may answer, from a server of the tests that says what it is told to."""

import asyncio
import json
from base64 import b64encode
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.adapters.calling import calls
from tests.adapters.linking import played

from telescope_adapters import openenv, servers
from telescope_adapters.openenv import OpenEnvEnvironment
from telescope_core import StopReason
from telescope_core.base.retries import is_of_answer
from telescope_core.errors import EndpointError
from telescope_core.in_process import InProcessEnvironment

TEXT = {"message": {"type": "string"}}
CALLS = {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}
OURS = {"content": {"type": "string"}, "tool_calls": {"type": "array"}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def seen(observation: object, reward: float | None = None, *, done: bool = False) -> dict:
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class Scripted:
    """A server whose answers to a reset and to steps are given; `None` ends the connection."""

    def __init__(self, *answers: object, fields: dict = TEXT) -> None:
        self.answers, self.fields = [*answers], fields
        self.steps: list[dict] = []
        self.asked: list[tuple[str, str]] = []
        """The address of each request, and the login to a proxy that came with it."""

    def note(self, request: web.Request) -> None:
        self.asked.append((str(request.url), request.headers.get("Proxy-Authorization", "")))

    async def schema(self, request: web.Request) -> web.Response:
        self.note(request)
        return web.json_response({"action": {"properties": self.fields}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        self.note(request)
        wire = web.WebSocketResponse()
        await wire.prepare(request)
        async for message in wire:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                break
            if asked.get("data", {}).get("type") == "list_tools":
                answer = seen({"tools": [{"name": "look"}, {"name": "finish"}]})
            else:
                self.steps += [asked["data"]] if asked["type"] == "step" else []
                answer = self.answers.pop(0)
            if answer is None:
                break
            await wire.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return wire


@asynccontextmanager
async def served(
    server: Scripted, *, proxied: pytest.MonkeyPatch | None = None, **settings: object
):
    """Yield the environment of a server of the tests, in this process.

    With `proxied` it is a server elsewhere, which the proxy of the variables stands for.
    """
    app = web.Application()
    app.add_routes([web.get("/schema", server.schema), web.get("/ws", server.session)])
    async with TestServer(app) as running:
        url = str(running.make_url(""))
        if proxied is not None:
            proxied.setenv("http_proxy", url.replace("://", "://me:secret@"))
            url = "http://games.invalid"
        made = OpenEnvEnvironment.from_settings({"id": url, "reward_max": 2.0, **settings})
        client = InProcessEnvironment(made, name="scripted")
        try:
            yield client
        finally:
            await client.close()


async def one_rollout(server: Scripted, *replies: object):
    async with served(server) as client:
        return await played(client, list(replies))


async def test_a_server_elsewhere_is_asked_through_the_proxy_of_the_variables(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    server = Scripted(seen({"text": "hi"}), seen({"text": "bye"}, 0.5, done=True))
    async with served(server, proxied=monkeypatch) as client:
        rollout = await played(client, ["one"])
    assert (rollout.error, rollout.reward) == (None, 0.5)
    login = f"Basic {b64encode(b'me:secret').decode()}"
    assert set(server.asked) == {
        (f"http://games.invalid/{path}", login) for path in ("schema", "ws")
    }


@pytest.mark.parametrize("after", [{"y": "a"}, "no JSON"])
async def test_calls_after_the_end_of_an_episode_are_not_made(after):
    over, more = seen({"result": "finished"}, 1.0, done=True), seen({"result": "a"}, 0.25)
    server = Scripted(seen({"t": "go"}), over, more, more, fields=CALLS)
    rollout = await one_rollout(
        server, calls(("finish", {}), ("look", after)), calls(("look", {"y": "b"}))
    )
    assert (rollout.reward, len(rollout.turns)) == (1.0, 1)
    assert rollout.stop_reason is StopReason.COMPLETED
    assert [one["tool_name"] for one in server.steps] == ["finish"]


async def test_the_last_observation_is_kept_and_its_numbers_are_metrics():
    last = {"text": "bye", "metadata": {"moves": 3, "why": "won", "metrics": {"length": 2.0}}}
    rollout = await one_rollout(Scripted(seen({"text": "hi"}), seen(last, 0.5, done=True)), "one")
    assert rollout.reward == 0.5
    assert (rollout.metrics["moves"], rollout.metrics["length"]) == (3.0, 2.0)
    (kept,) = [one for one in rollout.info if one.key == "last observation"]
    assert json.loads(kept.value) == last


async def test_messages_and_tools_of_our_own_server_are_the_policys():
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say"}]
    result = {"role": "tool", "content": "blue", "tool_call_id": "call-0"}
    server = Scripted(
        seen({"metadata": {}, "messages": asked, "tools": [LOOK]}, 0.0),
        seen({"metadata": {}, "messages": [result], "tools": [LOOK]}, 0.0),
        seen({"metadata": {"error": None}, "messages": [], "tools": []}, 1.0, done=True),
        fields=OURS,
    )
    rollout = await one_rollout(server, calls(("look", {"at": 1})), "blue")
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert [(one.role, one.content) for one in rollout.messages] == [
        *(("system", "Be brief."), ("user", "say"), ("assistant", "")),
        *(("tool", "blue"), ("assistant", "blue")),
    ]
    first, second = server.steps
    (call,) = first["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call-0", "look")
    assert second == {"content": "blue"}


async def test_messages_that_repeat_the_conversation_are_shown_once():
    whole = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "one"}]
    more = {"role": "user", "content": "again"}
    rollout = await one_rollout(
        Scripted(
            *(seen({"messages": one}) for one in (whole[:1], [*whole, more])),
            seen({}, 1.0, done=True),
        ),
        *("one", "two"),
    )
    assert [one.content for one in rollout.messages] == ["say", "one", "again", "two"]


async def test_an_episode_that_failed_on_the_server_has_its_error_and_no_reward():
    failed = {"metadata": {"status": "failed", "error": "ValueError: my grader broke"}}
    rollout = await one_rollout(
        Scripted(seen({"t": "hi"}, 0.0), seen(failed, done=True), fields=OURS), "one"
    )
    assert rollout.reward is None
    assert rollout.status_reason == "RewardRaisedError"
    assert "raised ValueError: my grader broke" in rollout.error
    assert is_of_answer(rollout)


@pytest.mark.parametrize(
    ("code", "is_final"), [("EXECUTION_ERROR", True), ("SESSION_ERROR", False)]
)
async def test_what_its_code_raises_at_an_answer_is_final(code, is_final):
    error = {"type": "error", "data": {"code": code, "message": "it broke"}}
    rollout = await one_rollout(Scripted(seen({"t": "hi"}), error), "one")
    assert (rollout.status_reason, is_of_answer(rollout)) == ("EndpointError", is_final)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("Internal error <html>", "answered step with 'Internal error <html>'"),
        ('{"type": "observation"}', 'answered step with \'{"type": "observation"}\''),
        ("[1]", "answered step with '[1]'"),
        (None, "closed the connection during step"),
        ('"' + 2**20 * "long" + '"', "sent more than 1 MiB during step"),
    ],
)
async def test_an_answer_that_is_none_names_the_server_and_the_step(monkeypatch, answer, told):
    monkeypatch.setattr(openenv, "_LARGEST_MIB", 1)
    rollout = await one_rollout(Scripted(seen({"t": "hi"}), answer), "one")
    assert rollout.status_reason == "EndpointError", rollout.error
    assert "/ws" in rollout.error
    assert told in rollout.error


async def test_an_observation_without_tools_is_no_list_of_them():
    socket = SimpleNamespace(address="ws://a/ws", ask=None)

    async def ask(*_):
        return {"observation": {"error": "no"}}

    socket.ask = ask
    with pytest.raises(EndpointError, match=r"ws://a/ws lists no tools"):
        await openenv._tools(socket)


async def test_pings_do_not_put_off_the_limit_of_a_step(monkeypatch):
    class Pinging:
        """As aiohttp's: its own limit begins anew with each ping, so it is never reached."""

        async def send_json(self, _):
            pass

        async def receive(self, timeout=None):
            await asyncio.Event().wait()

        async def receive_json(self, *, timeout):
            return {"type": "observation", "data": {"observation": {"t": "late"}}}

    monkeypatch.setattr(openenv, "_ANSWER_S", 0.0)
    with pytest.raises(EndpointError, match=r"ws://a/ws .*: nothing came within 0 s"):
        await openenv._Socket(Pinging(), "ws://a/ws").ask("step", {})


def refused() -> EndpointError:
    key = SimpleNamespace(host="a", port=1, ssl=None)
    error = EndpointError("http://a does not answer")
    error.__cause__ = aiohttp.ClientConnectorError(key, OSError(111, "refused"))
    return error


async def test_a_rollout_waits_for_a_server_that_is_restarted(monkeypatch):
    monkeypatch.setattr(servers, "_PAUSES_S", (0.0, 0.0, 0.0))
    left = [refused(), refused()]

    async def begin():
        if left:
            raise left.pop()
        return "begun"

    assert await servers.once_up(begin) == "begun"
    left += [refused() for _ in range(5)]
    with pytest.raises(EndpointError, match="does not answer"):
        await servers.once_up(begin)
    assert len(left) == 1, "in the end it is an error"
    left[:] = [EndpointError("it answered 500")]
    with pytest.raises(EndpointError, match="500"):
        await servers.once_up(begin)


async def test_an_episode_begins_once_the_server_is_up_again(monkeypatch):
    monkeypatch.setattr(servers, "_PAUSES_S", (0.0,))
    connect, away = aiohttp.ClientSession.ws_connect, [refused().__cause__]

    async def restarted(*given, **named):
        if away:
            raise away.pop()
        return await connect(*given, **named)

    monkeypatch.setattr(aiohttp.ClientSession, "ws_connect", restarted)
    rollout = await one_rollout(Scripted(seen({"t": "hi"}), seen({}, 1.0, done=True)), "one")
    assert (rollout.error, rollout.reward) == (None, 1.0)
