"""A rollout's endpoint belongs to it alone, ends with it, and frees what nobody waits for."""

import asyncio
import gc

import aiohttp
import openai
import pytest
from test_openai_client import ASK, client_of

from telescope_core.environments import Environment, Episode
from telescope_core.errors import ConfigError, EndpointError
from telescope_core.examples import ListSource
from telescope_core.gateway import Gateway
from telescope_core.gateway.policies import RecordedEnvironment
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.types import Example, Message, RolloutStatus, Sampling, Split, StopReason
from telescope_train.rollouts.failures import Boundary, boundary_of

LONGEST_S = 120.0


async def ask(client, **given):
    return await client.chat.completions.create(model="policy", messages=ASK, **given)


async def test_an_ended_rollout_and_a_wrong_key_are_told(serve):
    rollout, other = serve("2"), serve("3")
    async with client_of(rollout) as client, client_of(other) as stranger:
        stranger.base_url = client.base_url
        with pytest.raises(openai.AuthenticationError):
            await ask(stranger)
        rollout.policy.close()
        rollout.policy.close()
        for request in (ask(client), client.models.list()):
            with pytest.raises(openai.NotFoundError, match="ended"):
                await request
    assert rollout.policy.turns == other.policy.turns == []
    assert len(rollout.endpoint.api_key) >= 32
    assert rollout.endpoint.api_key not in repr(rollout.endpoint)


async def test_a_policy_that_nobody_holds_has_no_endpoint(serve):
    rollout = serve("2")
    gc.disable()
    try:
        async with client_of(rollout) as client:
            await ask(client)
            rollout.policy = None
            with pytest.raises(openai.NotFoundError):
                await ask(client)
        assert len(rollout.pool.prompts) == 1, "no server is asked for a rollout that is gone"
    finally:
        gc.enable()


async def test_a_client_that_goes_away_frees_the_slot_at_once(serve):
    rollout = serve("2")
    rollout.pool.hold = asyncio.Event()
    endpoint = rollout.endpoint
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        body = {"model": "policy", "messages": ASK, "stream": True}
        url = f"{endpoint.base_url}/chat/completions"
        request = asyncio.create_task(session.post(url, json=body))
        await asyncio.wait_for(rollout.pool.arrived.wait(), LONGEST_S)
        request.cancel()
        await asyncio.wait_for(rollout.pool.cancelled.wait(), LONGEST_S)
    assert rollout.policy.turns == []
    assert rollout.policy.recorder.failure is None


async def test_the_end_of_a_rollout_ends_what_is_asked(serve):
    rollout = serve("2")
    rollout.pool.hold = asyncio.Event()
    async with client_of(rollout) as client:
        request = asyncio.create_task(ask(client))
        await asyncio.wait_for(rollout.pool.arrived.wait(), LONGEST_S)
        rollout.policy.close()
        with pytest.raises(openai.NotFoundError):
            await asyncio.wait_for(request, LONGEST_S)
    assert rollout.pool.cancelled.is_set()


class Agent(Environment):
    """Asks through its own client; `swallows` goes on when that raises."""

    swallows = False
    runs_on = False

    def examples(self, split):
        return ListSource([Example(id="e", prompt="1+1=")])

    async def play(self, episode: Episode) -> StopReason:
        endpoint = episode.endpoint
        retries = 1 if self.swallows else 0
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=retries
        ) as client:
            try:
                reply = await ask(client)
                episode.add(Message(role="assistant", content=reply.choices[0].message.content))
            except openai.InternalServerError:
                if not self.swallows:
                    raise
            if self.runs_on:
                await asyncio.Event().wait()
        return StopReason.COMPLETED

    async def compute_reward(self, rollout, example):
        return 1.0


def request_of(deadline_s: float = 300.0) -> PlayRequest:
    sampling = Sampling(max_tokens=8)
    return PlayRequest(
        split=Split.TRAIN,
        example_index=0,
        group_id="g",
        index=0,
        sampling=sampling,
        deadline_s=deadline_s,
    )


async def play(serve, reply, deadline_s: float = 300.0, **traits):
    environment = type("Traits", (Agent,), traits)()
    client = RecordedEnvironment(InProcessEnvironment(environment, name="agent", version="0"))
    served = serve(reply)
    return await client.play(request_of(deadline_s), served.policy), served


async def test_a_rollout_carries_the_turns_of_its_policy(serve):
    rollout, served = await play(serve, "2")
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0)
    assert rollout.turns == tuple(served.policy.turns)
    assert rollout.turns[0].completion.completion_ids
    assert rollout.completion_text == "2"
    async with client_of(served) as client:
        with pytest.raises(openai.NotFoundError):
            await ask(client)


@pytest.mark.parametrize("asks", ["the endpoint", "the policy"])
async def test_a_prompt_that_does_not_fit_fails_and_counts_as_such(serve, asks):
    async def generate(self, episode: Episode) -> None:
        await episode.generate()

    traits = {} if asks == "the endpoint" else {"play": generate}
    environment = type("Traits", (Agent,), traits)()
    client = RecordedEnvironment(InProcessEnvironment(environment, name="agent", version="0"))
    served = serve("2", max_model_len=4)
    rollout = await client.play(request_of(), served.policy)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.stop_reason is StopReason.CONTEXT_LENGTH, rollout.error
    assert boundary_of(rollout) is Boundary.CONTEXT_LENGTH


@pytest.mark.slow
@pytest.mark.parametrize("swallows", [True, False])
async def test_a_server_that_fails_is_never_a_reward(serve, swallows):
    rollout, _ = await play(serve, EndpointError("no answer"), swallows=swallows)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.error == "EndpointError: no answer"


@pytest.mark.slow
async def test_a_failure_that_was_asked_again_is_forgotten(serve):
    replies = [EndpointError("once"), "2"]
    rollout, served = await play(serve, lambda _: replies.pop(0), swallows=True)
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0)
    assert len(served.pool.prompts) == 2
    assert len(rollout.turns) == 1


@pytest.mark.slow
async def test_a_deadline_ends_the_endpoint_and_keeps_the_turns(serve):
    rollout, served = await play(serve, "2", deadline_s=0.5, runs_on=True)
    assert (rollout.status, rollout.stop_reason) == (RolloutStatus.FAILED, StopReason.TIMEOUT)
    assert len(rollout.turns) == 1
    assert not served.policy.session.is_open


async def test_an_address_that_cannot_be_had_is_told(serve):
    rollout = serve("2")
    port = int(rollout.endpoint.base_url.split(":")[2].split("/")[0])
    gateway = Gateway(model="policy", port=port)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*gateway_port"):
        await gateway.start()
    await gateway.close()
    async with client_of(rollout) as client:
        assert (await ask(client)).choices[0].message.content == "2", "the first one goes on"
