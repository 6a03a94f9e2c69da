"""Environment processes over a real vLLM server: a cancelled rollout frees its place at once."""

import asyncio
import time
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


async def freed_after_s(math, client, session, url) -> float:
    """Cancel many rollouts in mid-answer; returns seconds until the server works on none."""
    tasks = [
        asyncio.create_task(
            math.play(
                PlayRequest(
                    split=Split.TRAIN,
                    example_index=index,
                    group_id="g",
                    index=index,
                    sampling=Sampling(max_tokens=200, temperature=1.0),
                    deadline_s=60,
                ),
                client.policy(str(index)),
            )
        )
        for index in range(NUM_ROLLOUTS)
    ]
    while await num_running(session, url) < NUM_ROLLOUTS // 3:
        assert not all(task.done() for task in tasks), "too quick to be cancelled"
    began_s = time.monotonic()
    num_open = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The server counts anew when it computes: one more request makes it, and it is alone by then.
    await client.complete([Message(role="user", content="1+1=")], Sampling(max_tokens=1))
    left = await num_running(session, url)
    freed_s = time.monotonic() - began_s
    assert num_open >= NUM_ROLLOUTS // 4
    assert left == 0, f"{left} of {num_open} cancelled requests go on"
    return freed_s


async def test_cancelled_rollouts_free_the_server_within_100_ms(math, vllm_server: str) -> None:
    client = ChatClient(f"{vllm_server}/v1", SERVED_MODEL_NAME)
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            await client.complete([Message(role="user", content="1+1=")], Sampling(max_tokens=1))
            best_s = float("inf")
            for _ in range(12):
                best_s = min(best_s, await freed_after_s(math, client, session, vllm_server))
                if best_s < 0.1:
                    break
        assert best_s < 0.1
    finally:
        await client.close()
