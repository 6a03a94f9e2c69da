"""Tasksets of the new API of `verifiers`: the rewards are those of their own run."""

import json
from pathlib import Path

import pytest
from tests.adapters.linking import ASKS_ONCE, by_itself, keeps_contract, link, opened, played

from telescope_core import RolloutStatus, Split, StopReason

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
PACKAGE = str(Path(__file__).with_name("verifiers_tasks"))
SUMS = "verifiers:sums_tasks"
USED = ("--with", PACKAGE, "--with", "verifiers==0.4.0")
ANSWERS = ["1", "2", "three", "40", "5", "6"]
ITSELF = (
    ASKS_ONCE
    + """
import asyncio, json
from aiohttp import web
ANSWERS = json.loads(sys.argv[1])

async def answer(request):
    body = await request.json()
    asked = int(body["messages"][-1]["content"].partition("+")[0])
    message = {"role": "assistant", "content": ANSWERS[asked]}
    return web.json_response({"id": "r", "object": "chat.completion", "created": 0,
        "model": "m", "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})

async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    env = load({"id": "sums_tasks"})
    tasks = list(env.taskset)
    context = vf.ModelContext(model="m",
        client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    rows = []
    async with env.serving():
        for task in tasks[: len(ANSWERS)]:
            episode = await env.run_episode(task, context)
            [trace] = episode.traces
            rows.append([trace.reward, trace.metrics["length"], trace.rewards["exact"].score])
    await runner.cleanup()
    return rows

from telescope_adapters.verifiers_tasks import VerifiersTasksEnvironment

def refused(settings):
    try:
        VerifiersTasksEnvironment.from_settings(settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

rows = asyncio.run(main())
print(json.dumps({"rows": rows, "refused": list(map(refused, json.loads(sys.argv[2])))}))
"""
)
REFUSED = {
    "ConfigError: sums_tasks has endless tasks; set env.max_tasks": {"options": {"has_end": False}},
    "ConfigError: sums_tasks: option 'no_such_option': ": {"options": {"no_such_option": 1}},
    "option 'size': expected a valid integer, got 'x'": {"options": {"size": "x"}},
    "EnvironmentLoadError: sums_tasks: harness 'bsh' not found": {"harness": "bsh"},
    "EnvironmentLoadError: sum_tasks: taskset 'sum_tasks' not found": {"id": "sum_tasks"},
}
"""What is said of settings."""


@pytest.fixture(scope="module")
def python(home):
    return link(SUMS, *USED)


@pytest.fixture(scope="module")
def told(python):
    """What one process says, since verifiers takes seconds to import."""
    asked = [{"id": "sums_tasks", **settings} for settings in REFUSED.values()]
    return by_itself(python, ITSELF, json.dumps(ANSWERS), json.dumps(asked))


async def by_question(client) -> dict[str, tuple[Split, int]]:
    """Return where each question is."""
    found = {}
    for split, size in (await client.describe()).num_examples.items():
        for index in range(size):
            example = await client.example(split, index)
            found[example.prompt[-1].content] = (split, index)
    return found


async def test_a_taskset_keeps_the_contract_with_the_rewards_of_verifiers(told):
    """In one worker, since verifiers takes seconds to import."""
    theirs = told["rows"]
    async with opened(SUMS) as client:
        places = await by_question(client)
        assert len(places) == 40
        first = next(question for question, place in places.items() if place == (Split.TRAIN, 0))
        right = str(int(first.partition("+")[0]) + 1)
        await keeps_contract(client, [right], 1.0)
        rollout = await played(client, [right])
        assert [m.role for m in rollout.messages] == ["system", "user", "assistant"]
        assert rollout.stop_reason is StopReason.COMPLETED
        ours = []
        for number, said in enumerate(ANSWERS):
            split, index = places[f"{number}+1="]
            ours.append(await played(client, [said], index=index, split=split))
        split, index = places["39+1="]
        failed = await played(client, ["40"], index=index, split=split)
    shown = [[one.reward, one.metrics["length"], one.metrics["exact"]] for one in ours]
    assert shown == theirs
    assert {row[0] for row in theirs} == {0.0, 0.25, 1.0}
    assert (failed.status, failed.reward) == (RolloutStatus.FAILED, None)
    assert "the grader broke (" in failed.error
    assert "sums_tasks/__init__.py:16)" in failed.error


def test_what_cannot_be_played_is_refused_by_name(told):
    for expected, came in zip(REFUSED, told["refused"], strict=True):
        assert expected in came
