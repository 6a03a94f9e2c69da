"""Tasks of inspect_ai through our adapter: the scores are those of their own eval."""

import asyncio
import json
from contextlib import chdir
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.adapters.linking import by_itself, keeps_contract, link, opened, played, telescope

from telescope_core import Completion, Message, Split, ToolCall

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
TASKS = str(Path(__file__).with_name("inspect_tasks.py"))
SUMS = f"inspect:{Path(TASKS).name}@sums"
ANSWERS = ["1", "The answer is 2", "3 of them", "four", "5", ""]
ITSELF = """
import json, sys, tempfile
from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import value_to_float
answers = json.loads(sys.argv[2])
outputs = [ModelOutput.from_content("mockllm", said) for said in answers]
for output in outputs:
    output.usage = ModelUsage(input_tokens=1, output_tokens=1)  # counting them asks the network
[log] = eval(sys.argv[1], model=get_model("mockllm/model", custom_outputs=outputs),
             max_samples=1, max_connections=1, log_dir=tempfile.mkdtemp())
assert log.status == "success", log.error
scores = {str(s.id): {n: value_to_float()(v.value) for n, v in s.scores.items()}
          for s in log.samples}
print()
print(json.dumps(scores))
"""

ODD = str(Path(__file__).with_name("inspect_odd.py"))
PLAYS = """
import asyncio, json, os, shutil, sys, tempfile
from pathlib import Path
from aiohttp import web
from telescope_adapters import inspect_ai as adapter
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import ContextLengthError, EndpointError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Message, Sampling, Split, ToolCall

said = []

def made(task, **settings):
    settings = {"id": f"{sys.argv[1]}@{task}", **settings}
    return adapter.InspectEnvironment.from_settings(settings)

def refused(task, **settings):
    try:
        made(task, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class Notes:
    endpoint = None
    def __init__(self, replies):
        self.policy, self.stops, self.shown = ScriptedClient(replies).policy("r"), [], []
    async def complete(self, messages, sampling, *, tools=()):
        self.stops.append(sampling.stop)
        self.shown.append([[m.role, m.content, m.reasoning] for m in messages])
        return await self.policy.complete(messages, sampling, tools=tools)

async def play(environment, *replies):
    client, policy = InProcessEnvironment(environment, name="odd"), Notes(replies)
    request = PlayRequest(split=Split.EVAL, example_index=0, group_id="g", index=0,
                          sampling=Sampling(max_tokens=8), deadline_s=300.0)
    rollout = await client.play(request, policy)
    return {"reward": rollout.reward, "error": rollout.error, "metrics": dict(rollout.metrics),
            "tags": dict(rollout.tags), "stop": rollout.stop_reason.value, "stops": policy.stops,
            "shown": policy.shown, "messages": [[m.role, m.content] for m in rollout.messages]}

def calls(name, arguments):
    call = ToolCall(id="c", name=name, arguments=arguments)
    message = Message(role="assistant", content="", tool_calls=(call,))
    return Completion(message=message, finish_reason="tool_calls")

def thinks(reasoning, content):
    message = Message(role="assistant", content=content, reasoning=reasoning)
    return Completion(message=message, finish_reason="stop")

async def judge(request):
    asked = (await request.json())["messages"][-1]["content"]
    key = request.headers["Authorization"].partition(" ")[2]
    answer = asked.partition("[Submission]")[2].partition("[Criterion]")[0]
    grade = "GRADE: C" if "Rhine" in answer and key == "given" else "hm"
    message = {"role": "assistant", "content": grade}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    about = {"id": "j", "object": "chat.completion", "created": 0, "model": "m"}
    return web.json_response({**about, "choices": [choice], "usage": usage})

async def judged():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    os.environ["GRADER_BASE_URL"] = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    os.environ["GRADER_API_KEY"] = "given"
    by_role = made("graded", judge="openai-api/grader/m")
    by_name = made("graded", options={"model": "openai-api/grader/m"})
    found = [await play(by_role, "Rhine"), await play(by_name, "Rhine"), await play(by_role, "Po")]
    await runner.cleanup()
    return found

def times_divided(size):
    calls, divide = [], adapter.split_of
    adapter.split_of = lambda name: calls.append(name) or divide(name)
    try:
        environment = made("many", options={"size": size}, samples="divided")
        found = sum(environment.examples(split).num_examples for split in environment.splits())
    finally:
        adapter.split_of = divide
    return [found, len(calls)]

def without_entry_point():
    package = Path(tempfile.mkdtemp(), "rivers")
    package.mkdir()
    for name in ("__init__.py", "tasks.py"):
        shutil.copy(sys.argv[1], package / name)
    sys.path.insert(0, str(package.parent))
    return refused("", id="rivers/asks_twice"), refused("", id="rivers/other")

async def main():
    shared = made("shared")
    found = {"side by side": await asyncio.gather(*(play(shared, "yes") for _ in range(4)))}
    found["later"] = await play(shared, "yes")
    found["set"] = await play(made("set_for_the_model"), "Rhenus")
    found["said"] = list(said)
    found["asks itself"] = await play(made("asks_twice"), "yes", "Rhine")
    for kind, limit in (("message_limit", 4), ("turn_limit", 2), ("token_limit", 6)):
        task = made("limited", options={"kind": kind, "limit": limit})
        found[kind] = await play(task, "yes")
    talks = made("limited", options={"limit": 90})
    found["full"] = await play(talks, "yes", ContextLengthError("no room"))
    found["away"] = await play(talks, "yes", EndpointError("the server is away"))
    found["several"] = await play(made("several", scorer="given/right"), "Rhine")
    found["all"] = await play(made("reads_all"), "Rhine")
    found["looks"] = await play(made("looks"), calls("look", "the sea"), "Rhine")
    found["agent"] = await play(made("agent"), calls("look", '{"where": "it"}'),
                                calls("submit", '{"answer": "Rhine"}'))
    tagged, apart = "<think>\\nElbe?\\n</think>\\n\\nRhine", thinks("Elbe?", "Rhine")
    found["thinks"] = [await play(made("exactly"), said, said) for said in (tagged, apart)]
    found["refused"] = [refused(task, **settings) for task, settings in json.loads(sys.argv[2])]
    found["without entry point"] = without_entry_point()
    found["judged"] = await judged()
    found["divided"] = [times_divided(size) for size in (250, 1000)]
    return found

with showing_troubles(said.append):
    found = asyncio.run(main())
print()
print(json.dumps(found))
"""
"""Plays tasks that show one thing each, in one process: importing inspect_ai takes seconds."""
REFUSED = (
    (("", {"id": f"{TASKS}@boxed"}), "uses sandbox, which only a whole eval of inspect_ai gives"),
    (("schema", {}), "sets response_schema for its model"),
    (("timed", {}), "uses cost_limit, which only a whole eval of inspect_ai gives"),
    (("below", {}), "an empty answer a score of -1, outside its declared range [0, 1]"),
    (("several", {}), "given/right, given/length; set env.scorer"),
    (("several", {"scorer": "given/rigth"}), "did you mean 'given/right'"),
    (("several", {"scorer": "give/right"}), "unknown scorer 'give/right'; known: given"),
    (("graded", {}), "name a judge with env.judge"),
    (("graded", {"options": {"role": ""}}), "name a judge with env.judge"),
    (("graded", {"options": {"model": "openai-api/grader/m"}}), "GRADER_API_KEY"),
    (("graded", {"judge": "openai-api/grader/m"}), "linked with --secret NAME"),
    (("words", {}), "gave 'good', which is no number"),
    (
        ("graded", {"options": {"rol": ""}}),
        "unexpected keyword argument 'rol'; did you mean 'role'",
    ),
    (("renamed", {"options": {"depth": 2}}), "argument 'depth'; it takes level"),
    (("below", {"reward_min": -1}), None),
    (("below", {"reward_min": -1 + 1e-12}), None),
)
"""Tasks and settings, and what is said before anything is asked; None = it can be played."""


@pytest.fixture(scope="module")
def python(home):
    """The Python of the framework; the file is linked from its own folder, and played from any."""
    with chdir(Path(TASKS).parent):
        return link(SUMS, "--with", "openai")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sums(python):
    """The task in one process, since inspect_ai takes seconds to import."""
    async with opened(SUMS, {"scorer": "includes"}) as client:
        yield client


@pytest.fixture(scope="module")
def odd(python):
    return by_itself(python, PLAYS, ODD, json.dumps([asked for asked, _ in REFUSED]))


def test_rollouts_of_a_sample_share_nothing_of_it(odd):
    rollouts = [*odd["side by side"], odd["later"]]
    assert [(one["error"], one["reward"]) for one in rollouts] == [(None, 1.0)] * 5
    assert [one["messages"][0] for one in rollouts] == [["user", "Exam. Which river is this?"]] * 5


def test_what_a_task_sets_for_its_model_is_asked_or_said_once(odd):
    assert odd["set"]["messages"][0] == ["system", "Answer in Latin."]
    assert odd["set"]["stops"] == [["Q:"]]
    lines = [line for line in odd["said"] if "set_for_the_model" in line]
    assert len(lines) == 2
    assert "epochs (the number of rollouts counts), epochs_reducer" in lines[0]
    assert lines[1].endswith(": max_tokens, temperature")


def test_a_solver_that_asks_the_model_itself_asks_the_policy(odd):
    assert (odd["asks itself"]["error"], odd["asks itself"]["reward"]) == (None, 1.0)


def test_limits_of_a_task_end_a_rollout_that_is_scored_as_it_stands(odd):
    ends = {"message_limit": "max_turns", "turn_limit": "max_turns", "token_limit": "length"}
    for limit, stop in ends.items():
        assert (odd[limit]["error"], odd[limit]["stop"]) == (None, stop)
        assert 0.1 <= odd[limit]["reward"] <= 0.2
    assert (odd["full"]["stop"], odd["full"]["reward"]) == ("context_length", 0.1)
    assert odd["away"]["error"] == "EndpointError: the server is away"


def test_a_policy_reads_the_error_of_a_tool_whose_one_argument_it_gave_as_text(odd):
    assert (odd["looks"]["error"], odd["looks"]["reward"]) == (None, 1.0)
    assert ["tool", "Error: nothing in the sea"] in odd["looks"]["messages"]
    assert odd["looks"]["shown"][1][-1] == ["tool", "Error: nothing in the sea", ""]


def test_an_agent_of_inspect_is_played(odd):
    assert (odd["agent"]["error"], odd["agent"]["reward"]) == (None, 1.0)
    assert ["tool", "Error: nothing in it"] in odd["agent"]["messages"]


def test_thinking_is_no_part_of_an_answer_and_is_shown_again_as_it_was_said(odd):
    for rollout in odd["thinks"]:
        assert (rollout["error"], rollout["reward"]) == (None, 1.0)
        # The answer that a scorer read is a vote in maj@k; a whole reply is none.
        assert rollout["tags"]["answer"] == "the Rhine"
    assert len(odd["several"]["tags"]["answer"]) == 64, "the digest of a long one"
    assert "answer" not in odd["all"]["tags"]
    tagged, apart = [one["shown"][1][-1] for one in odd["thinks"]]
    assert tagged == ["assistant", "<think>\nElbe?\n</think>\n\nRhine", ""]
    assert apart == ["assistant", "Rhine", "Elbe?"]


def test_one_of_several_values_is_the_reward(odd):
    assert odd["several"]["reward"] == 1.0
    assert odd["several"]["metrics"] == {"given/right": 1.0, "given/length": 0.05}


def test_what_no_answer_changes_is_said_before_one_is_asked_for(odd):
    for (asked, meant), came in zip(REFUSED, odd["refused"], strict=True):
        assert (came is None) if meant is None else (meant in came), (asked, came)


def test_a_task_of_a_package_without_an_entry_point_is_named_by_its_file(odd):
    named, unknown = odd["without entry point"]
    assert "entry point of the group inspect_ai" in named
    assert named.endswith("/rivers/tasks.py@asks_twice")
    assert "inspect:/" in named
    assert "unknown inspect_ai task 'rivers/other'" in unknown


def test_a_judge_is_asked_with_its_key_and_is_never_the_policy(odd):
    by_role, by_name, unread = odd["judged"]
    assert (by_role["error"], by_role["reward"]) == (None, 1.0)
    assert (by_name["error"], by_name["reward"]) == (None, 1.0)
    assert unread["error"].startswith("JudgeError: ")
    assert "the judge's answer could not be read" in unread["error"]


async def test_a_judge_gets_its_key_by_the_link(python, tmp_path, monkeypatch):
    key = "a-key-that-stays-with-the-judge"

    async def chat(request):
        body = await request.json()
        if body["model"] == "judge":
            assert request.headers["Authorization"] == f"Bearer {key}"
        content = "GRADE: C" if body["model"] == "judge" else "Rhine"
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "j", "object": "chat.completion", "created": 0, "model": body["model"]}
        return web.json_response({**about, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    name, settings = f"inspect:{ODD}@graded", {"judge": "openai-api/grader/judge"}
    usual = (name, "--with", "openai", "--settings", json.dumps(settings))
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        monkeypatch.setenv("GRADER_API_KEY", key)
        monkeypatch.setenv("GRADER_BASE_URL", url)
        granted = ("--secret", "GRADER_API_KEY", "--secret", "GRADER_BASE_URL")
        done = await asyncio.to_thread(telescope, "env", "link", *usual, *granted)
        assert done.returncode == 0, done.stderr
        asked = ("--base-url", url, "--model", "m", "--output", str(tmp_path / "eval"))
        done = await asyncio.to_thread(telescope, "eval", name, *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "eval/results.json").read_text())["reward"]["mean"] == 1.0
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file for file in written if key.encode() in file.read_bytes()] == []


def test_the_cost_of_samples_is_linear(odd):
    assert odd["divided"] == [[250, 250], [1000, 1000]]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_keeps_the_contract(sums):
    await keeps_contract(sums, ["1"], 1.0, Split.EVAL)
    rollout = await played(sums, ["1"], split=Split.EVAL)
    assert [m.role for m in rollout.messages] == ["system", "user", "assistant"]
    assert dict((await sums.describe()).num_examples) == {Split.EVAL: 6}


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_are_those_of_inspect(python, sums):
    theirs = by_itself(python, ITSELF, f"{TASKS}@sums", json.dumps(ANSWERS))
    ours = [await played(sums, [said], index=i, split=Split.EVAL) for i, said in enumerate(ANSWERS)]
    assert {one.example_id: dict(one.metrics) for one in ours} == theirs
    assert [one.reward for one in ours] == [one.metrics["includes"] for one in ours]
    assert {score["includes"] for score in theirs.values()} == {0.0, 1.0}


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_are_called_by_their_solver(sums):
    call = ToolCall(id="c1", name="add", arguments='{"a": 0, "b": 1}')
    said = Completion(
        message=Message(role="assistant", content="", tool_calls=(call,)),
        finish_reason="tool_calls",
    )
    rollout = await played(sums, [said, "1"], split=Split.EVAL)
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert [m.content for m in rollout.messages if m.role == "tool"] == ["1"]


async def test_choices_reach_solver_and_scorer(python):
    async with opened(SUMS, {"id": f"{TASKS}@choices"}) as client:
        right = await played(client, ["ANSWER: B"], split=Split.EVAL)
        wrong = await played(client, ["ANSWER: A"], split=Split.EVAL)
    assert (right.error, right.reward, wrong.reward) == (None, 1.0, 0.0)


def test_what_cannot_be_played_is_refused_by_name(python):
    for name, meant in (
        (f"inspect:{TASKS}@sumz", "unknown inspect_ai task"),
        ("inspect:/nowhere.py@sums", "no such file; expected file.py@task"),
    ):
        done = telescope("env", "link", name)
        assert done.returncode
        assert meant in done.stderr, done.stderr
