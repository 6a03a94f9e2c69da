"""What is sent: settings that were set, under the names that the endpoint takes."""

import asyncio
import json

import pytest
from loopback_endpoint import ASK, reply, serving

from telescope_core.errors import EndpointError
from telescope_core.types import Sampling

NEW_NAME = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'."
NO_TEMPERATURE = "'temperature' does not support 0.0 with this model, only the default (1)"


def refusing(text):
    return 400, json.dumps({"error": {"message": text}})


def picky(*refused):
    """Return an endpoint's judgment of a request: `refused` maps a field to its refusal."""

    def judge(body):
        for field, text in refused:
            if field in body:
                return refusing(text)
        return reply("fine")

    return judge


async def ask_with(client, sampling):
    return await client.policy("r").complete(ASK, sampling)


async def test_what_was_not_set_is_not_sent():
    async with serving(reply()) as (endpoint, client):
        await ask_with(client, Sampling(max_tokens=8, temperature=None))
        await ask_with(client, Sampling(max_tokens=8, top_p=0.9, extra={"reasoning_effort": "low"}))
        await ask_with(client, Sampling(max_tokens=8, extra={"top_p": 1.0}))
    plain, with_extra, explicit = (set(body) for body in endpoint.requests)
    assert plain == {"model", "messages", "max_tokens"}
    assert with_extra == plain | {"temperature", "top_p", "reasoning_effort"}
    assert endpoint.requests[2]["top_p"] == 1.0
    assert explicit == plain | {"temperature", "top_p"}


async def test_the_new_name_of_the_limit_is_learned_once():
    async with serving(picky(("max_tokens", NEW_NAME))) as (endpoint, client):
        first = await ask_with(client, Sampling(max_tokens=8))
        await asyncio.gather(*(ask_with(client, Sampling(max_tokens=9)) for _ in range(3)))
    limits = [
        (one.get("max_tokens"), one.get("max_completion_tokens")) for one in endpoint.requests
    ]
    assert limits == [(8, None), (None, 8), *[(None, 9)] * 3]
    assert first.num_retries == 1


async def test_requests_that_overlap_learn_together():
    async with serving(picky(("max_tokens", NEW_NAME))) as (endpoint, client):
        await asyncio.gather(*(ask_with(client, Sampling(max_tokens=9)) for _ in range(4)))
    assert len(endpoint.requests) <= 8


async def test_a_default_that_is_refused_is_left_out():
    judge = picky(("max_tokens", NEW_NAME), ("temperature", NO_TEMPERATURE))
    async with serving(judge, optional=("temperature",)) as (endpoint, client):
        await ask_with(client, Sampling(max_tokens=8, temperature=0.0))
    assert set(endpoint.requests[-1]) == {"model", "messages", "max_completion_tokens"}
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    "text", [NO_TEMPERATURE, "'max_tokens' or 'max_completion_tokens' exceed the context length"]
)
async def test_a_setting_that_was_asked_for_is_never_left_out(text):
    async with serving(lambda body: refusing(text)) as (endpoint, client):
        with pytest.raises(EndpointError, match="answered 400"):
            await ask_with(client, Sampling(max_tokens=8, temperature=0.0))
    assert len(endpoint.requests) == 1


async def test_an_endpoint_that_refuses_both_names_is_not_asked_for_ever():
    async with serving(lambda body: refusing(NEW_NAME)) as (endpoint, client):
        with pytest.raises(EndpointError, match="answered 400"):
            await ask_with(client, Sampling(max_tokens=8))
    assert len(endpoint.requests) == 2


async def test_an_endpoint_without_a_reader_of_tool_calls_is_refused_with_what_to_set():
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    async with serving(lambda body: refusing(said)) as (endpoint, client):
        with pytest.raises(EndpointError, match=r"--env\.tool_call_format xml"):
            await ask_with(client, Sampling(max_tokens=8))
    assert len(endpoint.requests) == 1
