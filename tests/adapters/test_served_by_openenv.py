"""Ours served by the real server of OpenEnv, and stepped by its own client."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.adapters.linking import WAIT, by_itself, link, opened, played
from tests.ports import free_port

from telescope_envs.install.adapted import environment_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]
CLIENT = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient

async def episode(url, answers, **reset):
    async with GenericEnvClient(base_url=url) as client:
        seen = [await client.reset(**reset)]
        for answer in answers:
            seen.append(await client.step({"content": answer}))
            if seen[-1].done:
                break
    return seen

async def main(url):
    right, wrong, broken, held = await asyncio.gather(
        episode(url, ["7", "14"], index=7),
        episode(url, ["7", "15"], seed=7),
        episode(url, ["break"], index=1),
        episode(url, ["x", "202"], index=1, split="eval"),
    )
    def texts(seen):
        return [[m["content"] for m in one.observation["messages"]] for one in seen]
    return {"texts": texts(right), "rewards": [e[-1].reward for e in (right, wrong, broken, held)],
            "about": [e[-1].metadata for e in (right, broken)]}

print(json.dumps(asyncio.run(main(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def python(home):
    return str(environment_for("openenv", ["openenv==0.10.0"]).python)


@pytest.fixture(scope="module")
def url(python):
    port = free_port()
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [python, "-m", "telescope_adapters.serving.openenv_server", "served_echo:Echo"]
    server = subprocess.Popen([*command, "--port", str(port)], env=environ)
    try:
        by_itself(sys.executable, WAIT, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def test_their_client_steps_our_environment(python, url):
    got = by_itself(python, CLIENT, url)
    assert got["texts"] == [["Say 7"], ["Now doubled."], []], "only what is new is sent"
    assert got["rewards"] == [1.0, 0.0, None, 1.0]
    right, broken = got["about"]
    assert (right["status"], right["metrics"]["letters"]) == ("kept", 2.0)
    assert (broken["status"], "it broke" in broken["error"]) == ("failed", True)


async def test_our_own_adapter_plays_it(url):
    name = f"openenv:{url}"
    link(name)
    async with opened(name) as client:
        alone = await played(client, ["7", "14"], index=7)
    assert alone.reward == 1.0, "without settings"
    async with opened(name, {"environment": "served_echo%3AEcho"}) as client:
        right = await played(client, ["7", "14"], index=7)
        broken = await played(client, ["break"], index=1, rollout=1)
    assert (right.error, right.reward, right.metrics["letters"]) == (None, 1.0, 2.0)
    assert [m.content for m in right.messages] == ["Say 7", "7", "Now doubled.", "14"]
    assert broken.reward is None
    assert "raised RuntimeError: it broke" in broken.error


def test_our_splits_are_their_tasks(url):
    with urlopen(f"{url}/served_echo%3AEcho/splits") as answer:
        assert [one["name"] for one in json.load(answer)] == ["train", "eval"]
