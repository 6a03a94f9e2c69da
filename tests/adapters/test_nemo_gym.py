"""Resources servers of NeMo Gym through our adapter.

A server of the tests says what no published one can be made to say. Published ones are played
nightly: the package needs another Python than ours.
"""

import asyncio
import json
import math
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.adapters.calling import calls
from tests.adapters.linking import (
    LIMIT_S,
    WAIT,
    by_itself,
    keeps_contract,
    link,
    opened,
    played,
)
from tests.ports import free_port

from telescope_adapters.frameworks import NEMO_GYM
from telescope_adapters.nemo_gym import NemoGymEnvironment
from telescope_adapters.servers import why_silent
from telescope_core import Completion, Message, RolloutStatus, Split, StopReason
from telescope_core.base.messages import message_to_record
from telescope_core.base.retries import is_of_answer
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_envs.processes.uv import Uv

SERVERS = Path(__file__).with_name("nemo_gym_servers.py")
PACKAGE = "nemo-gym==0.4.0"
TOOL = {
    "type": "function",
    "name": "count",
    "description": "Add to the counter.",
    "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}},
    "strict": True,
}
ASKED = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Count to 3."}]
ROW = {
    "id": 7,
    "responses_create_params": {"input": ASKED, "tools": [TOOL], "parallel_tool_calls": False},
    "goal": 3,
}
PICTURE = {
    "role": "user",
    "content": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}],
}
HTML = "<html></html>"
RIGHT = [calls(("count", {"by": 1}), ("count", {"by": 2})), "It is 3."]


class Counters:
    """A resources server whose sessions count; `instead` is what a path answers in place of it."""

    def __init__(self, **instead: tuple[int, object]) -> None:
        self.instead = {f"/{name}": one for name, one in instead.items()}
        self.paths = ["/seed_session", "/verify", "/count"]
        self.counts: dict[str, int] = {}
        self.verified: list[dict] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.path in self.instead:
            status, told = self.instead[request.path]
            if told == HTML:
                return web.Response(text=HTML, content_type="text/html", status=status)
            if isinstance(told, bytes):
                return web.Response(body=told, content_type="text/plain", status=status)
            return web.json_response(told, status=status)
        if request.path == "/openapi.json":
            return web.json_response({"paths": {path: {} for path in self.paths}})
        body = await request.json()
        if request.path == "/seed_session":
            session = f"s{len(self.counts)}"
            self.counts[session] = 0
            answer = web.json_response({})
            answer.set_cookie("counters", session)
            return answer
        session = request.cookies["counters"]
        if request.path == "/count":
            if not isinstance(body.get("by"), int):
                return web.json_response({"detail": "by must be an integer"}, status=422)
            self.counts[session] += body["by"]
            return web.json_response({"count": self.counts[session]})
        self.verified.append(body)
        told = {
            "reward": float(self.counts[session] == body["goal"]),
            "count": self.counts[session],
        }
        return web.json_response({**body, **told})


def rows(folder: Path, *given: dict) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in given or (ROW,)))
    return str(path)


@asynccontextmanager
async def served(counters: Counters, path: str, **settings: object):
    """Yield the environment of a server of the tests, in this process."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", counters.answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        made = NemoGymEnvironment.from_settings({"id": url, "train_data": path, **settings})
        client = InProcessEnvironment(made, name="nemo-gym:counters")
        try:
            yield client
        finally:
            await client.close()


async def test_tools_and_the_verifier_share_the_session_of_the_rollout(tmp_path):
    counters = Counters()
    async with served(counters, rows(tmp_path, ROW, {**ROW, "goal": 4}, ROW)) as client:
        about = await client.describe()
        right, wrong = await asyncio.gather(
            played(client, RIGHT), played(client, RIGHT, index=1, rollout=1)
        )
    assert dict(about.num_examples) == {Split.TRAIN: 2}, "equal rows are one example"
    assert about.offers_tools
    assert (right.reward, right.metrics["count"], right.error) == (1.0, 3.0, None)
    assert (wrong.reward, wrong.status) == (0.0, RolloutStatus.KEPT)
    assert [one.role for one in right.messages[:2]] == ["system", "user"]
    assert [one.content for one in right.messages if one.role == "tool"] == [
        *('{"count": 1}', '{"count": 3}'),
    ]
    [said] = [one for one in counters.verified if one["goal"] == 3]
    assert said["id"] == 7
    kinds = [one["type"] for one in said["response"]["output"]]
    assert kinds == [*["function_call"] * 2, *["function_call_output"] * 2, "message"]
    assert said["response"]["usage"]["output_tokens"] == 2 + 3
    assert said["response"]["incomplete_details"] is None


@pytest.mark.slow
async def test_what_was_said_is_an_answer_of_the_api(tmp_path):
    responses = pytest.importorskip("openai.types.responses")
    counters = Counters()
    thought = Message(role="assistant", content="It is 3.", reasoning="1 + 2")
    async with served(counters, rows(tmp_path)) as client:
        await played(client, [RIGHT[0], Completion(message=thought, finish_reason="length")])
    response = counters.verified[0]["response"]
    assert response["output"][-2]["summary"] == [{"type": "summary_text", "text": "1 + 2"}]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    # Results of calls are no part of an answer there; NeMo Gym adds them.
    told = [one for one in response["output"] if one["type"] != "function_call_output"]
    responses.Response.model_validate({**response, "output": told})


async def test_what_the_policy_calls_wrongly_is_told_to_it(tmp_path):
    said = [calls(("count", "[1"), ("verify", {}), ("count", {"by": "x"}))]
    counters = Counters()
    async with served(counters, rows(tmp_path)) as client:
        rollout = await played(client, [*said, *RIGHT])
    told = [one.content for one in rollout.messages if one.role == "tool"]
    assert "no JSON object" in told[0]
    assert "no tool 'verify'" in told[1], "the verifier is no tool"
    assert "must be an integer" in told[2]
    assert (rollout.reward, len(counters.verified)) == (1.0, 1)


@pytest.mark.parametrize(
    ("path", "answer", "reason", "said"),
    [
        ("seed_session", (500, "no room"), "EndpointError", "no room"),
        ("count", (500, "it broke"), "EndpointError", "it broke"),
        ("count", (200, b"\xff"), "EndpointError", "/count answered what is no text"),
        ("verify", (500, "KeyError('x')"), "RewardRaisedError", "KeyError"),
        ("verify", (200, HTML), "RewardRaisedError", "no JSON"),
        ("verify", (200, {"reward": None}), "RewardError", "None"),
        ("verify", (200, {"reward": math.nan}), "RewardError", "got nan"),
        ("verify", (200, {"reward": 1.0, "speed": math.inf}), "RewardError", "metric speed"),
        ("verify", (200, {"reward": 0.0, "mask_sample": True}), "RewardRaisedError", "nothing"),
        ("openapi.json", (502, "bad gateway"), "EndpointError", "bad gateway"),
        ("openapi.json", (200, {"paths": {"/step": {}}}), "UnplayableError", "stepped"),
        ("openapi.json", (200, {"paths": {"/verify": {}}}), "UnplayableError", "/seed_session"),
    ],
)
async def test_what_fails_at_the_server_is_no_reward(tmp_path, path, answer, reason, said):
    async with served(Counters(**{path: answer}), rows(tmp_path)) as client:
        rollout = await played(client, RIGHT)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.status_reason == reason
    assert said in rollout.error


@pytest.mark.parametrize(
    ("path", "answer", "is_final"),
    [
        # Its framework answers so for whatever its code raises.
        ("count", (500, "KeyError('x')"), True),
        ("verify", (500, "KeyError('x')"), True),
        ("verify", (503, "busy"), False),
        ("count", (502, "bad gateway"), False),
    ],
)
async def test_what_code_of_the_server_raises_at_an_answer_is_final(
    tmp_path, path, answer, is_final
):
    async with served(Counters(**{path: answer}), rows(tmp_path)) as client:
        rollout = await played(client, RIGHT)
    assert rollout.turns
    assert is_of_answer(rollout) == is_final


async def test_calls_that_the_verifier_grades_itself_end_the_rollout(tmp_path):
    # Such as structured_outputs and terminal_multi_harness of 0.7.0, which have none of the tools.
    counters = Counters()
    counters.paths = ["/seed_session", "/verify"]
    async with served(counters, rows(tmp_path), call_tools=False) as client:
        rollout = await played(client, RIGHT)
    assert (rollout.reward, len(rollout.turns), rollout.stop_reason) == (0.0, 1, "completed")
    said = counters.verified[0]["response"]["output"]
    assert [(one["type"], one["arguments"]) for one in said] == [
        ("function_call", '{"by": 1}'),
        ("function_call", '{"by": 2}'),
    ]


async def test_thinking_of_rows_stands_in_its_summary(tmp_path):
    # As in the rows of single_step_tool_use_with_argument_comparison.
    thought = {"type": "reasoning", "id": "r", "encrypted_content": None}
    summary = [{"type": "summary_text", "text": "1 and 2."}]
    answer = {"type": "message", "role": "assistant", "content": "It is 3."}
    asked = [*ASKED, {**thought, "summary": summary}, answer, ASKED[1], {**thought, "summary": []}]
    given = {"responses_create_params": {"input": [*asked, answer, ASKED[1]], "tools": [TOOL]}}
    async with served(Counters(), rows(tmp_path, {**ROW, **given})) as client:
        example = await client.example(Split.TRAIN, 0)
    said = [(one.reasoning, one.content) for one in example.prompt if one.role == "assistant"]
    assert said == [("1 and 2.", "It is 3."), ("", "It is 3.")]


async def test_a_server_without_the_tools_of_the_rows_is_refused(tmp_path):
    counters = Counters()
    counters.paths = ["/seed_session", "/verify", "/counts"]
    async with served(counters, rows(tmp_path)) as client:
        rollout = await played(client, RIGHT)
    assert rollout.status_reason == "UnplayableError"
    assert "has no tool count" in rollout.error
    assert "env.call_tools" in rollout.error
    counters.paths = ["/seed_session", "/verify", "/{path}"]
    async with served(counters, rows(tmp_path)) as client:
        assert (await played(client, RIGHT)).reward == 1.0, "one address takes all names"
    no_tools = {**ROW, "responses_create_params": {"input": "Count to 3.", "tools": []}}
    offered = Counters(seed_session=(200, {"mcp": {"url_path": "/mcp"}}))
    async with served(offered, rows(tmp_path, no_tools)) as client:
        rollout = await played(client, RIGHT)
    assert "MCP" in rollout.error


async def test_a_link_tells_why_its_server_cannot_be_played(tmp_path):
    factory = NEMO_GYM.factory
    for server, said in ((Counters(), ""), (Counters(**{"openapi.json": (404, {})}), "404")):
        async with served(server, rows(tmp_path)) as client:
            why = await why_silent(factory, client._environment.config.model_dump())
        assert bool(why) == bool(said)
        assert said in why
    silent = {"id": "http://127.0.0.1:1", "train_data": rows(tmp_path)}
    assert "http://127.0.0.1:1/openapi.json does not answer" in await why_silent(factory, silent)


async def test_a_rollout_that_is_cut_is_verified_as_it_stands(tmp_path):
    counters = Counters()
    async with served(counters, rows(tmp_path), max_turns=1) as client:
        cut = await played(client, RIGHT)
    assert (cut.reward, cut.stop_reason) == (1.0, StopReason.MAX_TURNS)
    assert counters.verified[0]["response"]["output"][-1]["type"] == "function_call_output"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "env.eval_data"),
        ({"eval_data": "rows.jsonl"}, "absolute"),
        ({"eval_data": "/no/such/rows.jsonl"}, "does not exist"),
        ({"eval_data": {"question": "1 + 2?"}}, "responses_create_params"),
        (
            {"eval_data": {"responses_create_params": {"input": "x", "tool_choice": "required"}}},
            "tool_choice",
        ),
        (
            {"eval_data": {"responses_create_params": {"input": [PICTURE]}}},
            "reads text alone",
        ),
        (
            {"eval_data": {"responses_create_params": {"input": [{"type": "computer_call"}]}}},
            "computer_call",
        ),
    ],
)
def test_rows_that_cannot_be_played_are_refused_when_they_are_read(tmp_path, given, said):
    if isinstance(row := given.get("eval_data"), dict):
        given = {"eval_data": rows(tmp_path, row)}
    with pytest.raises((ConfigError, EnvironmentLoadError), match=said):
        NemoGymEnvironment.from_settings({"id": "http://127.0.0.1:1", **given})


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with the package, which takes none below 3.12."""
    found = [shutil.which("python3.12"), shutil.which("python3.13")]
    found += sorted(Path.home().glob(".pyenv/versions/3.1[23].*/bin/python"))
    tried = (
        one for one in found if one and subprocess.run([one, "-c", ""], check=False).returncode == 0
    )
    newer = next(tried, None)
    if newer is None:
        pytest.skip("there is no Python 3.12 or 3.13 here")
    folder, uv = tmp_path_factory.mktemp("nemo-gym") / "venv", Uv()
    uv.make_venv(folder, python=str(newer))
    made = str(folder / "bin" / "python")
    uv.run_cache_first(["pip", "install", "--python", made, PACKAGE], failure=PACKAGE)
    return made


@contextmanager
def serving(python: str, server: str, folder: Path):
    """Yield the name of a published server once it answers."""
    port = free_port()
    log = (folder / "server.log").open("w")
    running = subprocess.Popen(
        [python, str(SERVERS), "serve", server, str(port)], cwd=folder, stdout=log, stderr=log
    )
    try:
        by_itself(sys.executable, WAIT, f"http://127.0.0.1:{port}/openapi.json")
        yield f"nemo-gym:http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(timeout=LIMIT_S)
        log.close()


def synonyms(row: dict, *, is_right: bool) -> list:
    """Return answers for a row of example_multi_step: look the values up, then tell them."""
    looked_up = [("get_synonym_value", {"synonym": one}) for one in row["expected_synonyms"]]
    values = row["expected_synonym_values"] if is_right else row["expected_synonym_values"][:-1]
    told = ("extract_synonym_values", {"synonym_values": values})
    return [calls(*looked_up), calls(told), "Done."]


def count(row: dict, *, is_right: bool) -> list:
    """Return answers for a row of example_session_state_mgmt, whose sessions count."""
    missing = row["expected_count"] - row["initial_count"] - (not is_right)
    return [calls(("increment_counter", {"count": missing})), calls(("get_counter_value", {})), "?"]


def office(row: dict, *, is_right: bool) -> list:
    """Return answers for a row of workplace_assistant, whose verifier compares the calls."""
    wanted = [(one["name"], one["arguments"]) for one in row["ground_truth"]]
    searched = ("email_search_emails", {"query": "report"})
    return [calls(searched), *([calls(*wanted)] if is_right else []), "Done."]


@pytest.mark.nightly
@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("server", "answers"),
    [
        ("example_multi_step", synonyms),
        ("example_session_state_mgmt", count),
        ("workplace_assistant", office),
    ],
)
async def test_published_servers_give_the_rewards_of_their_verifiers(
    python, server, answers, tmp_path
):
    data = by_itself(python, SERVERS.read_text(), "data", server)
    with serving(python, server, tmp_path) as name:
        link(name, "--settings", json.dumps({"train_data": data}))
        async with opened(name) as client:
            num_examples = (await client.describe()).num_examples[Split.TRAIN]
            examples = [await client.example(Split.TRAIN, at) for at in range(num_examples)]
            first = answers(examples[0].info["row"], is_right=True)
            await keeps_contract(client, first, 1.0)
            said = [
                (
                    one.info["row"],
                    await played(client, answers(one.info["row"], is_right=is_right), index=at),
                )
                for is_right in (True, False)
                for at, one in enumerate(examples)
            ]
    ours = [rollout.reward for _, rollout in said]
    assert ours == [1.0] * num_examples + [0.0] * num_examples
    if server == "example_session_state_mgmt":
        return  # its verifier reads the session, which only the server has
    pairs = [(row, [message_to_record(m) for m in one.messages]) for row, one in said]
    (tmp_path / "said.json").write_text(json.dumps(pairs))
    told = by_itself(python, SERVERS.read_text(), "verify", server, str(tmp_path / "said.json"))
    assert ours == told
