"""Servers of the Open Reward Standard through our adapter.

A server of the tests says what no published one can be made to say; the package `openreward`
serves in a virtual environment of its own.
"""

import json
import math
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.adapters.calling import calls
from tests.adapters.linking import keeps_contract, link, opened, played, serving

from telescope_adapters import ors
from telescope_adapters.ors import OrsEnvironment
from telescope_core import RolloutStatus, Split, StopReason
from telescope_core.errors import ConfigError, EnvironmentLoadError, UnplayableError
from telescope_core.in_process import InProcessEnvironment
from telescope_envs.install.adapted import environment_for

SERVERS = Path(__file__).with_name("ors_servers.py")
TASKS = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
RIGHT = [calls(("add", {"a": 1, "b": 2})), calls(("answer", {"value": 3}))]
_IN_SESSION = ("/sums/messages", "/sums/task_tools", "/sums/call")
SAID = [[("look", {})], [("guess", {"number": 3})], [("guess", {"number": 5})]]
"""What a policy calls of the server `Guess`."""
RIGHTLY = "it is  right  it is  right  it is  right"
TEXT = {"type": "text", "text": "What is  1 + 2?"}


def events(*told: tuple[str, str]) -> str:
    return "".join(f"event: {kind}\r\ndata: {data}\r\n\r\n" for kind, data in told)


def result(text: str, reward: float | None = None, *, finished: bool = False) -> str:
    blocks = [{"type": "text", "text": text, "detail": None}]
    output = {"blocks": blocks, "metadata": None, "reward": reward, "finished": finished}
    whole = json.dumps({"ok": True, "output": output})
    # In pieces, one of which begins with a space.
    pieces = [whole[at : at + 9] for at in range(0, len(whole), 9)]
    last = len(pieces) - 1
    return events(
        ("task_id", "t"), *(("end" if at == last else "chunk", p) for at, p in enumerate(pieces))
    )


class Sums:
    """A server with the environment `sums`; `instead` is what a path answers in place of it."""

    def __init__(self, **instead: object) -> None:
        self.instead = {f"/{name.replace('__', '/')}": one for name, one in instead.items()}
        self.tools = {"tools": [{"name": n, "description": n} for n in ("add", "answer")]}
        self.open: dict[str, dict] = {}
        self.num_opened = 0

    async def answer(self, request: web.Request) -> web.Response:
        instead = self.instead.get(request.path)
        if isinstance(instead, list):
            instead = instead.pop(0) if instead else None
        if instead is not None:
            status, text, *headers = instead
            return web.Response(status=status, text=text, headers=dict(headers))
        session = request.headers.get("X-Session-ID", "")
        body = await request.json() if request.can_read_body else {}
        if request.path == "/create":
            self.open[session] = body["task_spec"]
            self.num_opened += 1
        elif request.path == "/delete":
            del self.open[session]
        elif request.path in _IN_SESSION and session not in self.open:
            raise web.HTTPNotFound
        if request.path == "/sums/call":
            return web.Response(text=self._called(body, self.open[session]))
        if request.path == "/create_session":
            return web.Response(text=events(("task_id", f"s{self.num_opened}"), ("end", "")))
        told = {
            "/list_environments": ["sums"],
            "/sums/splits": [
                {"name": "train", "type": "train"},
                {"name": "hard", "type": "validation"},
            ],
            "/sums/tasks": {"tasks": TASKS},
            "/sums/num_tasks": {"num_tasks": 2},
            "/sums/task": {"task": TASKS[body.get("index", 0)]},
            "/sums/messages": [{"role": "user", "blocks": [TEXT]}],
            "/sums/task_tools": self.tools,
        }
        return web.json_response(told.get(request.path, {}))

    def _called(self, body: dict, task: dict) -> str:
        given = body["input"]
        if body["name"] == "add":
            return result(str(given["a"] + given["b"]), 0.25)
        if body["name"] == "answer":
            is_right = given["value"] == task["a"] + task["b"]
            return result(RIGHTLY if is_right else "wrong", 0.75 * is_right, finished=True)
        told = {"ok": False, "error": f"no tool {body['name']}", "reason": "not_found"}
        return events(("task_id", "t"), ("end", json.dumps(told)))


@asynccontextmanager
async def served(sums: Sums, **settings: object):
    """Yield the environment of a server of the tests, in this process."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", sums.answer)
    async with TestServer(app) as server:
        made = OrsEnvironment.from_settings({"id": str(server.make_url("/")), **settings})
        client = InProcessEnvironment(made, name="ors:sums")
        try:
            yield client
        finally:
            await client.close()


async def test_the_rewards_of_all_calls_are_summed_and_the_session_is_closed():
    sums = Sums()
    async with served(sums) as client:
        about = await client.describe()
        rollout = await played(client, RIGHT)
        wrong = await played(client, [calls(("answer", {"value": 4}))])
    assert dict(about.num_examples) == {Split.TRAIN: 2, Split.EVAL: 2}
    assert about.offers_tools
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert [one.content for one in rollout.messages if one.role != "assistant"] == [
        *("What is  1 + 2?", "3", RIGHTLY),
    ]
    assert (wrong.reward, wrong.status) == (0.0, RolloutStatus.KEPT)
    assert (sums.open, sums.num_opened) == ({}, 2)


async def test_what_the_policy_calls_wrongly_is_told_to_it():
    said = [calls(("add", "[1"), ("ad", {"a": 1})), *RIGHT]
    async with served(Sums()) as client:
        rollout = await played(client, said)
    told = [one.content for one in rollout.messages if one.role == "tool"]
    assert told[0].startswith("error: ")
    assert "no JSON object" in told[0]
    assert "no tool ad" in told[1]
    assert rollout.reward == 1.0


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("sums__call", (500, "it broke"), "it broke"),
        ("sums__call", (404, "Active environment not found"), "not found"),
        ("sums__call", (200, events(("task_id", "t"), ("error", "no disk"))), "no disk"),
        ("sums__call", (200, events(("task_id", "t"), ("chunk", "{"))), "gave no result"),
        ("sums__messages", (500, "setup broke"), "setup broke"),
        ("create", (500, "no room"), "no room"),
        ("create_session", (502, "bad gateway"), "bad gateway"),
        ("create_session", (200, "{}"), "/create_session answered no object with sid"),
        ("sums__call", (200, "event: end\ndata: {\n\n"), "/sums/call gave no result of the tool"),
        ("sums__task_tools", (200, "[]"), "/sums/task_tools answered no object with tools"),
        ("list_environments", (200, "<html>"), "no JSON"),
    ],
)
async def test_what_fails_at_the_server_is_a_failed_attempt(path, answer, said):
    sums = Sums(**{path: answer})
    async with served(sums) as client:
        # The examples were read before the server fell ill.
        client._environment.examples = lambda split: [{"id": "x", "prompt": "x", "task": TASKS[0]}]
        rollout = await played(client, RIGHT)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.status_reason == "EndpointError"
    assert said in rollout.error
    assert sums.open == {}


async def test_a_server_that_is_gone_is_a_failed_attempt():
    async with served(Sums()) as client:
        await client.example(Split.TRAIN, 0)
        client._environment.url = "http://127.0.0.1:1"
        rollout = await played(client, RIGHT)
    assert (rollout.status, rollout.status_reason) == (RolloutStatus.FAILED, "EndpointError")
    assert "http://127.0.0.1:1/list_environments does not answer" in rollout.error


async def test_a_session_that_starts_is_waited_for(monkeypatch):
    monkeypatch.setattr(ors, "_PAUSE_S", 0.0)
    starting = (503, "still starting", ("X-Backend-State", "starting"))
    async with served(Sums(sums__messages=[starting, starting])) as client:
        rollout = await played(client, RIGHT)
    assert rollout.reward == 1.0


async def test_servers_of_older_versions_are_played():
    older = Sums(
        create_session=(200, '{"sid": "old"}'),
        sums__task_tools=(404, "Not Found"),
        sums__tools=(200, json.dumps(Sums().tools)),
        sums__messages=(404, "Not Found"),
        sums__prompt=(200, json.dumps([TEXT])),
    )
    async with served(older) as client:
        rollout = await played(client, RIGHT)
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert rollout.messages[0].content == "What is  1 + 2?"


@pytest.mark.parametrize(("arg", "reward"), [("value", 0.0), (None, 0.5)])
async def test_an_answer_without_a_call_goes_to_the_tool_that_takes_it(arg, reward):
    sums = Sums()
    sums.tools = {"tools": [], "terminal_tool": {"name": "answer", "arg": arg}}
    if arg is None:
        sums.instead["/sums/call"] = (200, result("graded", 0.5, finished=True))
    async with served(sums) as client:
        rollout = await played(client, ["three"])
    assert (rollout.reward, rollout.stop_reason) == (reward, StopReason.COMPLETED)
    assert rollout.messages[-1].content == "three"


async def test_a_policy_that_stops_early_keeps_what_it_earned():
    async with served(Sums(), max_turns=1) as client:
        cut = await played(client, RIGHT)
        gave_up = await played(client, ["I do not know."])
    assert (cut.reward, cut.stop_reason) == (0.25, StopReason.MAX_TURNS)
    assert (gave_up.reward, gave_up.stop_reason) == (0.0, StopReason.COMPLETED)


@pytest.mark.parametrize("reward", [None, math.nan, -math.inf])
async def test_an_end_without_a_finite_reward_is_no_reward_of_0(reward):
    answer = (200, result("done", reward, finished=True))
    async with served(Sums(sums__call=answer)) as client:
        rollout = await played(client, RIGHT)
    assert (rollout.reward, rollout.status_reason) == (None, "RewardError")
    assert "http://127.0.0.1" in rollout.error  # the server's fault, not that of a file of ours


async def test_conversations_and_pictures_reach_the_policy():
    picture = {"type": "image", "mimeType": "image/png", "data": "iVBORw0KGgo="}
    told = [
        {"role": "system", "blocks": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "blocks": [TEXT, picture]},
        {
            "role": "assistant",
            "blocks": [
                {"type": "reasoning", "text": "I look."},
                {"type": "tool_call", "id": "c", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "blocks": [
                {"type": "tool_result", "tool_call_id": "c", "blocks": [TEXT]},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    async with served(Sums(sums__messages=(200, json.dumps(told)))) as client:
        rollout = await played(client, RIGHT)
    opening = rollout.messages[:5]
    assert [one.role for one in opening] == ["system", "user", "assistant", "tool", "user"]
    assert [image.media_type for image in opening[1].images] == ["image/png"]
    assert (opening[2].reasoning, opening[2].tool_calls[0].name) == ("I look.", "add")
    assert opening[3].tool_call_id == "c"
    told[1]["blocks"][1] = {**picture, "mimeType": "image/tiff"}
    async with served(Sums(sums__messages=(200, json.dumps(told)))) as client:
        rollout = await played(client, RIGHT)
    assert rollout.status_reason == "UnplayableError"


async def test_tasks_that_are_not_listed_are_read_one_at_a_time():
    async with served(Sums(sums__tasks=(400, "use num_tasks"))) as client:
        assert (await client.describe()).num_examples[Split.TRAIN] == 2
        second = await client.example(Split.TRAIN, 1)
    assert (second.id, second.info["task"]) == ("train-1", TASKS[1])


async def test_what_the_server_does_not_have_is_refused_with_what_it_has():
    for settings, said in (
        ({"environment": "sum"}, "sums"),
        ({"eval_split": "hrad"}, "hard"),
    ):
        async with served(Sums(), **settings) as client:
            with pytest.raises((ConfigError, EnvironmentLoadError), match=said):
                await client.describe()
    none = Sums(sums__splits=(200, '[{"name": "odd", "type": "other"}]'))
    async with served(none) as client:
        with pytest.raises((UnplayableError, EnvironmentLoadError), match="odd"):
            await client.describe()
    only_eval = Sums(sums__splits=(200, '[{"name": "test", "type": "test"}]'))
    async with served(only_eval) as client:
        assert [*(await client.describe()).num_examples] == [Split.EVAL]


@pytest.fixture(scope="module")
def servers(home, tmp_path_factory):
    """Servers of the package in its virtual environment, and what `itself` gave for `SAID`."""
    folder = tmp_path_factory.mktemp("ors")
    python = environment_for("ors", ["openreward==0.1.167"]).python
    init = [python.with_name("orwd"), "init", "basic_room"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True)
    asked = json.dumps([[0, SAID], [1, SAID]])
    with serving([python, SERVERS, "basic_room", asked], folder) as told:
        names = {name: f"ors:http://127.0.0.1:{at}" for name, at in told["ports"].items()}
        yield names, told["itself"]


@pytest.mark.slow
async def test_environments_of_the_package_keep_the_contract(servers):
    names, theirs = servers
    name, replies = names["guess"], [calls(*one) for one in SAID]
    link(name, "--settings", json.dumps({"reward_min": -1.0}))
    async with opened(name) as client:
        await keeps_contract(client, replies, theirs[0])
        ours = [(await played(client, replies, index=index)).reward for index in range(2)]
        broken = await played(client, [calls(("guess", {"number": 13}))])
        odd = await played(client, [calls(("guess", {"number": "x"})), *replies])
    assert ours == theirs
    assert theirs[0] != theirs[1]
    assert (broken.status, broken.reward) == (RolloutStatus.FAILED, None)
    assert "the server broke" in broken.error
    assert odd.reward == theirs[0], "what the policy calls wrongly is told to it"


@pytest.mark.slow
async def test_an_environment_that_the_package_writes_is_played_as_it_is(servers):
    name = servers[0]["written"]
    made = OrsEnvironment.from_settings({"id": name.removeprefix("ors:")})
    client = InProcessEnvironment(made, name=name)
    for split, right in {Split.TRAIN: "4", Split.EVAL: "8"}.items():
        for answer in ("4", "8"):
            said = [calls(("answer", {"answer": answer}))]
            rollout = await played(client, said, split=split)
            assert (rollout.reward, rollout.error) == (float(answer == right), None)
    await client.close()
