"""Environments of `verifiers` through our adapter: the rewards are those of their own loop."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.adapters.linking import by_itself, keeps_contract, link, opened, played, telescope

from telescope_adapters.verifiers import as_messages
from telescope_core import Completion, Message, RolloutStatus, Split, StopReason, ToolCall
from telescope_core.gateway.messages import _text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
PACKAGE = str(Path(__file__).with_name("verifiers_sums"))
SUMS = "verifiers:sums"
BOTH = Path(__file__).with_name("verifiers_both.py").read_text()
ANSWERS = ["1", "2", "three", "40", "5", "6"]
PROGRAM = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage
from served_echo import Echo, Rewrites
from telescope_adapters.verifiers import VerifiersEnvironment
from telescope_adapters.serving.verifiers_served import verifiers_environment
from telescope_core.errors import TelescopeError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split

asked = []

class Script(Client):
    async def get_response(self, prompt, model, sampling_args, tools=None, **_):
        asked.append([one.content for one in prompt])
        said = self._client[len(prompt) // 2] if isinstance(self._client, list) else self._client
        message = ResponseMessage(content=said, finish_reason="stop", is_truncated=False)
        return Response(id="r", created=0, model=model, message=message)
    async def unused(self, *_, **__): ...
    setup_client = to_native_tool = to_native_prompt = get_native_response = unused
    raise_from_native_response = from_native_response = close = unused

def refused(settings):
    sys.modules["new_api"] = type(sys)("new_api")
    try:
        VerifiersEnvironment.from_settings(settings)
    except TelescopeError as error:
        return str(error)

async def theirs(answers):
    env = vf.load_environment("sums")
    rows = [dict(row) for row in env.get_dataset()]
    states = [await env._run_rollout_state(rows[i], Script(said), "m", {"max_tokens": 8})
              for i, said in enumerate(answers)]
    return [[state["reward"], state["metrics"]["length"]] for state in states]

async def served():
    env = verifiers_environment(Echo.from_settings({}), name="echo")
    rows, held_out = list(env.get_dataset()), list(env.get_eval_dataset())
    states = [await env._run_rollout_state(row, Script(said), "m", {}) for row, said in (
        (rows[3], ["3", "6"]), (rows[3], ["3", "7"]), (held_out[1], ["101", "202"]))]
    broken = await env.rollout(rows[0], Script(["break"]), "m", {})
    asked.clear()
    env = verifiers_environment(Rewrites.from_settings({}), name="rewrites")
    rewritten = await env._run_rollout_state(dict(env.get_dataset()[0]), Script("3"), "m", {})
    return {"rewards": [state["reward"] for state in states],
            "said": [m.content for m in states[0]["completion"]],
            "asked": asked, "rewritten": [rewritten["reward"], repr(rewritten["error"])],
            "sizes": [len(rows), len(held_out)], "error": repr(broken["error"])}

def ours(**options):
    made = VerifiersEnvironment.from_settings({"id": "sums", "options": options})
    return InProcessEnvironment(made, name="verifiers:sums")

async def play(kind, *replies):
    request = PlayRequest(split=Split.TRAIN, example_index=0, group_id="g", index=0,
                          sampling=Sampling(max_tokens=8), deadline_s=300.0)
    one = await ours(kind=kind).play(request, ScriptedClient(replies).policy("r"))
    shown = [[m.content for m in said] for said in one.conversations]
    return {"status": one.status, "reward": one.reward, "reason": one.status_reason,
            "error": one.error, "conversations": shown}

async def without_eval():
    client = ours(has_eval=False)
    sizes = (await client.describe()).num_examples
    return {split: [(await client.example(split, i)).answer for i in range(size)]
            for split, size in sizes.items()}

async def main():
    answers, settings, plays = map(json.loads, sys.argv[2:])
    return {"theirs": await theirs(answers), "served": await served(),
            "plays": [await play(*one) for one in plays], "without eval": await without_eval(),
            "refused": list(map(refused, settings))}

print(json.dumps(asyncio.run(main())))
"""
"""What verifiers does by itself, with an environment of ours, and with the adapter around it.

All of it is in one process, since importing verifiers takes seconds.
"""
PLAYS = (
    ("forgets", "no", "1"),
    ("turns", "no", "1"),
    ("breaks", "1"),
    ("breaks", "1x"),
    ("unset", "1"),
)
"""Kinds of `sums`, and what the policy says."""
REFUSED = {
    "new-api": {"id": "new-api"},
    "group": {"id": "sums", "options": {"kind": "group"}},
    "sum": {"id": "sum"},
    "options": {"id": "sums", "options": {"level": 3}},
}


@pytest.fixture(scope="module")
def python(home):
    return link(SUMS, "--with", PACKAGE)


@pytest.fixture(scope="module")
def told(python):
    """What the program says, which knows verifiers and the environments alone."""
    asked = map(json.dumps, (ANSWERS, list(REFUSED.values()), PLAYS))
    found = by_itself(python, PROGRAM, str(Path(__file__).parent), *asked)
    return {**found, "plays": dict(zip(PLAYS, found["plays"], strict=True))}


def test_parts_of_a_message_are_lines_as_a_server_makes_them():
    parts = [{"type": "text", "text": "Read this."}, {"type": "text", "text": "2 + 2 = ?"}]
    (message,) = as_messages([{"role": "user", "content": parts}])
    assert message.content == "Read this.\n2 + 2 = ?"
    assert message.content == _text(parts, "content"), "as our own gateway reads them"


async def test_a_single_turn_keeps_the_contract_with_the_rewards_of_verifiers(told):
    async with opened(SUMS) as client:
        await keeps_contract(client, ["1"], 1.0)
        rollout = await played(client, ["1"])
        assert [m.role for m in rollout.messages] == ["system", "user", "assistant"]
        assert rollout.stop_reason is StopReason.COMPLETED
        about = await client.describe()
        assert dict(about.num_examples) == {Split.TRAIN: 40, Split.EVAL: 5}
        assert about.success_threshold == 0.5, "what verifiers counts as solved"
        ours = [await played(client, [said], index=i) for i, said in enumerate(ANSWERS)]
        message = Message(role="assistant", content="1")
        filtered = await played(
            client, [Completion(message=message, finish_reason="content_filter")]
        )
    assert filtered.reward == 1.0, "an answer that a content filter ended is scored"
    assert [[one.reward, one.metrics["length"]] for one in ours] == told["theirs"]
    assert {reward for reward, _ in told["theirs"]} == {0.0, 0.25, 1.0}


async def test_tools_are_called_by_their_environment(python):
    call = ToolCall(id="c1", name="add", arguments='{"a": 0, "b": 1}')
    said = Completion(
        message=Message(role="assistant", content="", tool_calls=(call,)),
        finish_reason="tool_calls",
    )
    async with opened(SUMS, {"options": {"kind": "tools"}}) as client:
        assert (await client.describe()).offers_tools
        await keeps_contract(client, [said, "1"], 1.0)
        rollout = await played(client, [said, "1"])
    assert [m.content for m in rollout.messages if m.role == "tool"] == ["1"]


def test_every_conversation_of_a_rewritten_history_is_kept(told):
    shown = told["plays"]["forgets", "no", "1"]["conversations"]
    assert shown == [["0+1=", "no"], ["A number, please.", "1"]]
    assert told["plays"]["turns", "no", "1"]["conversations"] == []


def test_a_reward_function_that_raises_is_a_failure(told):
    failed = told["plays"]["breaks", "1"]
    assert (failed["status"], failed["reward"]) == (RolloutStatus.FAILED, None)
    assert "reward function breaks of sums raised ZeroDivisionError" in failed["error"]
    assert "sums/__init__.py:23), which verifiers" in failed["error"]
    assert told["plays"]["breaks", "1x"]["status"] == RolloutStatus.KEPT
    failed = told["plays"]["unset", "1"]
    assert failed["reason"] == "RewardError"
    assert "reward function unset of sums gave nan" in failed["error"]


def test_without_an_eval_set_a_hash_divides_the_rows(told):
    answers = told["without eval"]
    assert sum(map(len, answers.values())) == 40
    assert not set(answers[Split.TRAIN]) & set(answers[Split.EVAL])


def test_ours_is_played_by_the_loop_of_verifiers(told):
    got = told["served"]
    assert got["rewards"] == [1.0, 0.0, 1.0]
    assert got["said"] == ["3", "Now doubled.", "6"]
    assert got["sizes"] == [8, 8]
    again = ["In short: two.", "3", "And three?"]
    assert got["asked"] == [["A long story."], again[:1], again]
    assert got["rewritten"] == [1.0, "None"]
    assert "it broke" in got["error"]


def test_what_cannot_be_played_is_refused_by_name(told):
    said = dict(zip(REFUSED, told["refused"], strict=True))
    # What is a module of the new API, which the same process can be asked for.
    assert "new-api" in said["new-api"]
    assert "--with verifiers==0.4.0" in said["new-api"]
    assert "all rollouts" in said["group"]
    assert "'sums'" in said["sum"]
    assert "unexpected keyword argument 'level'; it takes kind, has_eval" in said["options"]


def require_same(found: dict) -> None:
    """Check what `verifiers_both` printed: their rewards, what ended a rollout, what is refused."""
    for kind, fault in {"mixed-breaks": "ZeroDivisionError", "worded": "TypeError"}.items():
        [broken] = found["both"].pop(kind)
        assert f"of sums raised {fault}" in broken[3]
    for kind, cases in found["both"].items():
        for mine, _, _, error, theirs in cases:
            assert not error, (kind, error)
            assert theirs in (None, mine), (kind, cases)
    assert [one[1] for one in found["both"]["turns"]][2:] == ["max_turns", "context_length"]
    assert found["both"]["strings"][0][2] == [["user", "0+1="], ["assistant", "1"]]
    counted = 0.005 if found["version"].startswith("0.1.8") else 0.01
    rewards = [one[0] for one in found["both"]["spends"]]
    assert rewards == pytest.approx([0.5 + counted, 0.125 + counted, 0.25])
    stopped = [one[1] for one in found["both"]["budget"]]
    has_budget = not found["version"].startswith(("0.1.8", "0.1.10"))
    assert stopped == ["length" if has_budget else "completed", "completed"]
    assert [one[0] for one in found["both"]["stops"]] == [1.0, 0.0]
    assert [one[0] for one in found["both"]["turn-stops"]] == [1.0, 0.0]
    said = [content for role, content in found["both"]["turn-stops"][0][2] if role == "assistant"]
    assert said == ["no</a>, 1", "1"]
    notes = [one for one in found["said"] if "is not used here" in one]
    assert [note.rpartition(": ")[2] for note in notes] == ["temperature, top_k", "top_p"]
    refused = found["refused"]
    assert "'robot'" in refused["roles"]
    assert "without a reward function" in refused["unscored"]
    assert "all rollouts" in refused["group"]
    assert "all rollouts" in refused["mixed-group"]
    assert all("Best.score_group" in refused[kind] for kind in ("best", "mixed-best"))
    assert "score_rollouts" in refused["unrated"]
    assert "sets guided_regex for its model" in refused["chooses"]


def test_each_class_of_environment_is_scored_as_by_verifiers(python):
    found = by_itself(python, BOTH)
    require_same(found)
    assert all(one[4] is not None for cases in found["both"].values() for one in cases)
    assert [one[0] for one in found["both"]["mixed"]] == [1.0, 1.0, 1.0, 0.25]
    assert [one[0] for one in found["both"]["nested"]] == [1.0, 1.0, 0.25]


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["0.1.8", "0.1.10", "0.1.14"])
def test_old_versions_are_scored_as_by_themselves(home, version):
    used = ("--with", PACKAGE, "--with", f"verifiers=={version}", "--allow-sdist", "wget")
    found = by_itself(link(SUMS, *used), BOTH)
    assert found["version"].startswith(version)
    require_same(found)


@pytest.mark.nightly
async def test_a_judge_gets_the_key_that_the_link_names(home, tmp_path, monkeypatch):
    """Linked without the key it is refused with the option; with it, the judge is asked with it."""
    keys: set[str] = set()

    async def judge(request: web.Request) -> web.Response:
        keys.add(request.headers["Authorization"])
        asked = (await request.json())["messages"][-1]["content"]
        said = "yes" if "\n7\n" in asked.partition("Response:")[2] else "no"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant"}}
        choice["message"]["content"] = said
        about = {"id": "c", "object": "chat.completion", "created": 0, "model": "judge"}
        return web.json_response({**about, "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    name, kind = "verifiers:judged/sums", ("--settings", '{"options": {"kind": "judge"}}')
    used = ("env", "link", name, "--with", PACKAGE, *kind)
    async with TestServer(app) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-the-judges-own-key")
        monkeypatch.setenv("OPENAI_BASE_URL", str(server.make_url("/v1")))
        refused = await asyncio.to_thread(telescope, *used)
        assert refused.returncode == 3
        assert "--secret OPENAI_API_KEY" in refused.stderr
        named = ("--secret", "OPENAI_API_KEY", "--secret", "OPENAI_BASE_URL")
        done = await asyncio.to_thread(telescope, *used, *named, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["secrets"] == ["OPENAI_API_KEY", "OPENAI_BASE_URL"]
        assert "sk-the-judges" not in done.stdout + done.stderr
        async with opened(name) as client:
            assert (await played(client, ["7"])).reward == 1.0
            assert (await played(client, ["8"])).reward == 0.0
    assert keys == {"Bearer sk-the-judges-own-key"}
