"""Servers of several processes: every one takes every update, and nobody else may call them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.conftest import backend_settings, local_ranks, tiny_server
from tests.e2e.test_weight_updates import rollout_of

from telescope_core.errors import EndpointError
from telescope_core.records.servers import ServerState
from telescope_core.types import Message, Sampling
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.transfer import Wire
from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import pack
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.batches.weighting import token_weights
from telescope_train.chat.renderer import load_renderer
from telescope_train.inference.client import TokenClient
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import ServerSettings, running
from telescope_train.inference.wire import ENGINE_PATH, TOKEN_PLANE_PATH
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.weights.publish import WeightPublisher

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SECRET = "a-secret-of-this-test"
NUM_UPDATES = 3
PROMPT = "12+34="


@pytest.fixture(scope="module", params=["tensor", "data"])
def parallel_server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerSettings]:
    """A server of two processes that asks for a secret."""
    log_path = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
    settings = replace(
        tiny_server(tiny_model, log_path),
        secret=SECRET,
        more_arguments=("--seed", "3", "--max-num-batched-tokens", "512"),
        **{f"{request.param}_parallel_size": 2},
    )
    with running(settings, deadline_s=180):
        yield settings


async def test_both_processes_take_every_update(
    tiny_model: Path, parallel_server: ServerSettings
) -> None:
    settings = backend_settings(tiny_model, learning_rate=2e-3)
    client = TokenClient(parallel_server.base_url, secret=SECRET)
    pool, ranks = ServerPool([client]), local_ranks(settings)
    wire = Wire(workers_per_server=2)
    try:
        publisher = WeightPublisher(pool, ranks, in_flight="pause", wire=wire)
        await fails_and_answers(client)
        await publisher.connect()
        policies = TokenPolicySource(pool, load_renderer(settings.model), max_model_len=256)
        for version in range(NUM_UPDATES):
            assert await mismatch(policies, ranks, version) <= 1e-3
            await publisher.publish(version + 1)
            assert pool.version == version + 1
        assert await mismatch(policies, ranks, NUM_UPDATES, trains=False) <= 1e-3
        assert pool.servers[0].state is ServerState.SERVING
        await refuses_to_sleep(client)
        await refuses_strangers(parallel_server)
    finally:
        await pool.close()
        await ranks.close()


async def mismatch(
    policies: TokenPolicySource, ranks: LocalRanks, version: int, *, trains: bool = True
) -> float:
    """Return how far the log-probs of servers and trainer are apart, nats; then take a step."""
    sampling = Sampling(max_tokens=12, temperature=0.8)
    # Several at once, so that each of two engines computes some.
    completions = await asyncio.gather(
        *(
            policies.policy(f"g{index}/0").complete(
                [Message(role="user", content=f"{index}{PROMPT}")], sampling
            )
            for index in range(8)
        )
    )
    assert {one.newest_version for one in completions} == {version}
    samples = [
        one
        for index, completion in enumerate(completions)
        for one in samples_from_rollout(
            rollout_of(completion, index=index), (-1.0) ** index, sampling.temperature
        )
    ]
    weights_N = token_weights(samples, load_algorithm("grpo").weighting, max_tokens=12)
    shards = pack(samples, weights_N, seq_len=1024, num_ranks=1)
    if trains:
        row = await ranks.train_step(StepPlan(minibatches=[shards], order=[0]), version)
        return max(abs(row["mismatch/max"]), abs(row["mismatch/min"]))
    (batches,) = await ranks.logprobs(shards)
    off = [
        abs(found[mask] - batch.behavior_logprobs_T[mask]).max()
        for batch, found in zip(shards[0], batches, strict=True)
        if (mask := batch.mask_T).any()
    ]
    return float(max(off))


async def fails_and_answers(client: TokenClient) -> None:
    """After a call that fails in all processes, each answers what it is asked next."""
    with pytest.raises(EndpointError):
        await client.control("/update_weights", {"update_info": {}})
    answers = [
        (await client.control("/collective_rpc", {"method": method}))["results"]
        for method in ("received_digests", "received_digest")
    ]
    assert [[type(one) for one in both] for both in answers] == [[dict] * 2, [str] * 2]


async def refuses_to_sleep(client: TokenClient) -> None:
    """On CPU vLLM would answer 200, free nothing, and answer no request after it."""
    for path in ("/sleep", "/wake_up"):
        with pytest.raises(EndpointError, match="cannot sleep"):
            await client.control(path, query="?level=1", is_repeatable=True)


async def refuses_strangers(settings: ServerSettings) -> None:
    """No route that the real server has answers without the secret."""
    headers = {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{settings.base_url}/openapi.json", headers=headers) as reply:
            assert reply.status == 200
            routes = (await reply.json())["paths"]
        assert {"/update_weights", "/collective_rpc", "/v1/completions", "/health"} <= set(routes)
        asked = [(method, path) for path, methods in routes.items() for method in methods]
        asked += [("get", "/metrics"), ("get", ENGINE_PATH), ("post", "/telescope/v1/pause")]
        for method, path in asked:
            async with session.request(method, f"{settings.base_url}{path}") as reply:
                assert reply.status == 401, (method, path)
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(f"{settings.base_url}{TOKEN_PLANE_PATH}")
