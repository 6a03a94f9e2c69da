"""Environment processes over a real vLLM server: a cancelled rollout frees its place at once."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from telescope_core.chat.client import ChatClient
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.protocols import EnvironmentClient, PlayRequest
from telescope_core.types import Message, Sampling, Split
from telescope_train.inference.server import SERVED_MODEL_NAME

pytestmark = pytest.mark.engine
NUM_ROLLOUTS = 48
MOST_STEPS = 20
"""Requests of one token each after which nothing that was cancelled is left."""
ONE_TOKEN = Sampling(max_tokens=1)
DIGITS = {"level": "digit", "operations": "+", "instruction": ""}


@pytest.fixture
async def math() -> AsyncIterator[EnvironmentClient]:
    """math-reasoning in two processes of its own."""
    processes = ProcessSettings(isolation=Isolation.PROCESS, num_workers=2)
    client = open_environment("math-reasoning", DIGITS, processes)
    await client.describe()
    yield client
    await client.close()


async def num_running(session: aiohttp.ClientSession, url: str) -> int:
    """Return what the server says of itself: requests that it computes, or that wait for it."""
    async with session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(names)))


async def cancel_many(math, client, session, url) -> int:
    """Cancel many rollouts in mid-answer; returns how many of them the server was sampling."""
    tasks = [
        asyncio.create_task(
            math.play(
                PlayRequest(
                    split=Split.TRAIN,
                    example_index=index,
                    group_id="g",
                    index=index,
                    sampling=Sampling(max_tokens=900, temperature=1.0),
                    deadline_s=600,
                ),
                client.policy(str(index)),
            )
        )
        for index in range(NUM_ROLLOUTS)
    ]
    while await num_running(session, url) < NUM_ROLLOUTS // 3:
        assert not all(task.done() for task in tasks), "too quick to be cancelled"
    num_open = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return num_open


async def test_cancelled_rollouts_free_the_server_within_a_few_steps(math, vllm_server: str):
    """Steps of the engine, because seconds also say what else the machine does.

    Answers of these weights have a hundred tokens in the middle, and one takes a step.
    """
    client = ChatClient(f"{vllm_server}/v1", SERVED_MODEL_NAME)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(600):
            await client.complete([Message(role="user", content="1+1=")], ONE_TOKEN)
            num_open = await cancel_many(math, client, session, vllm_server)
            assert num_open >= NUM_ROLLOUTS // 4
            for _ in range(MOST_STEPS):
                # The server counts anew when it computes, and this makes it.
                await client.complete([Message(role="user", content="1+1=")], ONE_TOKEN)
                left = await num_running(session, vllm_server)
                if not left:
                    break
            assert left == 0, f"{left} of {num_open} cancelled requests go on"
    finally:
        await client.close()
