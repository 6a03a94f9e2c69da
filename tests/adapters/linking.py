"""What the tests of adapters share: linked environments, played in their own virtual environments.

Each framework gets one virtual environment in the session, from pinned versions, as a user's does.
Published environments are played by a model on vLLM, which says one of the replies that a test
allows: of a tiny model that says what it likes, every environment would think the same.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.asking import ask

from telescope_core import RolloutStatus, Split
from telescope_core.errors import EndpointError
from telescope_core.open import open_environment
from telescope_core.scripted import ScriptedClient
from telescope_envs.install.adapted import link_adapted

LIMIT_S = 2900
NUM_AT_ONCE = 6
Choose = Callable[..., Awaitable[Any]]
"""Returns which of some values the model says next; a `seed` makes it say the same again."""
ASKS_ONCE = """
import sys
from types import ModuleType
import httpx
import verifiers.v1 as vf
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

class Asks(Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages = [*system, {"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None) as client:
            await client.post(f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"})
        return ProgramResult(0, "", "")

module = ModuleType("asks_once")
module.Asks, module.__all__ = Asks, ["Asks"]
sys.modules["asks_once"] = module

def load(taskset):
    from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
    return vf.load_environment(SingleAgentEnvConfig.model_validate({
        "taskset": taskset, "interception": {"type": "server"},
        "agent": {"harness": {"id": "asks_once"}, "runtime": {"type": "subprocess"}}}))
"""
"""The beginning of a program that plays tasksets of `verifiers` by asking the model once a task."""
WAIT = """
import json, sys, time, urllib.request
limit = time.monotonic() + 600
while True:
    try:
        print(json.dumps(urllib.request.urlopen(sys.argv[1], timeout=60).status))
        break
    except OSError:
        if time.monotonic() > limit:
            raise
        time.sleep(0.05)
"""
"""A program that ends once there is something at an address."""


def telescope(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-c", "from telescope_cli.main import main; main()", *arguments],
        env=dict(os.environ),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def link(name: str, *options: str) -> str:
    """Link `name` as the command with these options does; returns the Python of its framework."""
    given = list(zip(options[::2], options[1::2], strict=True))
    assert {option for option, _ in given} <= {"--with", "--settings", "--allow-sdist"}
    return link_adapted(
        name,
        packages=[value for option, value in given if option == "--with"],
        settings=json.loads(dict(given).get("--settings", "{}")),
        allow_sdist=[value for option, value in given if option == "--allow-sdist"],
    ).interpreter


def by_itself(python: str, program: str, *arguments: str):
    """Return what a program that knows the framework alone prints as JSON."""
    done = subprocess.run(
        [python, "-c", program, *arguments],
        env={**os.environ, "INSPECT_DISPLAY": "none"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return json.loads(done.stdout.splitlines()[-1])


@asynccontextmanager
async def opened(name: str, settings: dict | None = None):
    client = open_environment(name, settings)
    try:
        yield client
    finally:
        await client.close()


async def played(client, replies, *, index: int = 0, rollout: int = 0, split=Split.TRAIN):
    request = ask(split=split, example_index=index, index=rollout, deadline_s=300.0)
    return await client.play(request, ScriptedClient(replies).policy("r"))


async def keeps_contract(client, replies: Sequence, reward: float, split=Split.TRAIN) -> None:
    """What every adapter must do: ids that stay, rollouts side by side, failures that are none.

    `replies` give the first example of `split` `reward`.
    """
    about = await client.describe()
    assert about.reward_min <= reward <= about.reward_max
    for one in about.num_examples:
        first, again = await client.example(one, 0), await client.example(one, 0)
        assert first == again
    if len(about.num_examples) == 2:
        train, held_out = [await client.example(split, 0) for split in (Split.TRAIN, Split.EVAL)]
        assert train.id != held_out.id
    together = (played(client, replies, rollout=i, split=split) for i in range(NUM_AT_ONCE))
    for rollout in await asyncio.gather(*together):
        assert rollout.status is RolloutStatus.KEPT, rollout.error
        assert rollout.reward == reward
        assert len(rollout.turns) == sum(m.role == "assistant" for m in rollout.messages)
        assert rollout.messages[0].role in ("system", "user")
    failed = await played(client, [EndpointError("the server is away")], split=split)
    assert failed.status is RolloutStatus.FAILED
    assert failed.reward is None
    assert "the server is away" in failed.error
    after = await played(client, replies, split=split)
    assert after.reward == reward, "a rollout that failed leaves nothing behind"


@asynccontextmanager
async def model_endpoint(server: str, answer: Callable[[dict[str, Any], Choose], Awaitable[dict]]):
    """Yield the address at which `answer` makes messages of requests and of what the model chose.

    `server` is the address of the model's own server.
    """
    async with httpx.AsyncClient(base_url=server, timeout=LIMIT_S) as model:

        async def chat(request: web.Request) -> web.Response:
            body = await request.json()

            async def choose(values: Sequence[Any], seed: int | None = None) -> Any:
                by_text = {str(value): value for value in values}
                asked = {
                    "model": "policy",
                    "messages": [
                        {"role": one["role"], "content": one.get("content") or ""}
                        for one in body["messages"]
                    ],
                    "structured_outputs": {"choice": list(by_text)},
                    "max_tokens": max(map(len, by_text)) + 1,
                    "seed": seed,
                }
                answered = await model.post("/v1/chat/completions", json=asked)
                if not answered.is_success:
                    raise web.HTTPBadRequest(text=f"the model answered {answered.text}")
                return by_text[answered.json()["choices"][0]["message"]["content"]]

            message = {"role": "assistant", **await answer(body, choose)}
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "finish_reason": reason, "message": message}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            about = {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"]}
            return web.json_response({**about, "choices": [choice], "usage": usage})

        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", chat)
        async with TestServer(app) as served:
            yield str(served.make_url("/v1"))


@contextmanager
def serving(command: Sequence[str | Path], folder: Path | None = None):
    """Yield the table that is the first line of a program, which serves until the end."""
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()
