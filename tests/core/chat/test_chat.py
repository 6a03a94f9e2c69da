"""The chat client against a small endpoint on loopback."""

import asyncio
import json
from array import array
from dataclasses import replace

import pytest
from loopback_endpoint import ASK, SAMPLING, ask, reply, serving
from tests.ports import free_port

from telescope_core.chat.client import ChatClient
from telescope_core.chat.http import HttpPool, RequestLimits
from telescope_core.chat.replies import read_completion
from telescope_core.errors import ConfigError, EndpointError, UnknownNameError
from telescope_core.types import Message, ToolCall


async def test_answers_with_text_counts_and_the_only_model():
    async with serving(reply(), api_key="k") as (endpoint, client):
        completion = await ask(client)
        body = endpoint.requests[0]
        assert endpoint.headers[0]["Authorization"] == "Bearer k"
    assert completion.message == Message(role="assistant", content="hello")
    assert (completion.num_prompt_tokens, completion.num_completion_tokens) == (5, 2)
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "temperature": 0.5,
        "stop": ["x"],
        "seed": 3,
        "top_k": 4,
    }


async def test_each_turn_of_a_rollout_has_a_seed_of_its_own():
    async with serving(reply()) as (endpoint, client):
        for _ in range(2):
            policy = client.policy("g/0", SAMPLING)
            for seed in (SAMPLING.seed, SAMPLING.seed, 5):
                await policy.complete(ASK, replace(SAMPLING, seed=seed))
        seeds = [request["seed"] for request in endpoint.requests]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    assert seeds[2] == 5  # of an environment that gives its own


async def test_tools_go_through_and_native_calls_come_back():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    tool = {"type": "function", "function": {"name": "add"}}
    history = (
        *ASK,
        Message(
            role="assistant", content="", tool_calls=(ToolCall(id="c0", name="f", arguments="{}"),)
        ),
        Message(role="tool", content="7", tool_call_id="c0"),
    )
    async with serving(reply(None, "tool_calls", tool_calls=[call])) as (endpoint, client):
        completion = await ask(client, history, tools=[tool])
        body = endpoint.requests[0]
    assert body["tools"] == [tool]
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert body["messages"][2]["tool_call_id"] == "c0"
    assert completion.finish_reason == "tool_calls"
    assert completion.message.content == ""
    assert completion.message.tool_calls == (ToolCall(id="c1", name="add", arguments='{"a":1}'),)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thinking_is_read_and_sent_back(name):
    async with serving(reply("5", **{name: "2 and 3"}), reply("6")) as (endpoint, client):
        completion = await ask(client)
        await ask(client, (*ASK, completion.message))
        body = endpoint.requests[1]
    assert (completion.message.reasoning, completion.message.content) == ("2 and 3", "5")
    assert body["messages"][1]["reasoning_content"] == "2 and 3"


@pytest.mark.parametrize("trouble", [429, 500, 503, "drop"])
async def test_busy_and_broken_answers_are_tried_again(trouble):
    async with serving(trouble, trouble, reply(finish_reason="length")) as (endpoint, client):
        completion = await ask(client)
    assert completion.finish_reason == "length"
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("code", [429, "503"])
@pytest.mark.parametrize("more", [{}, {"choices": None}, {"choices": [], "user_id": "u"}])
async def test_a_busy_server_behind_a_router_is_asked_again(code, more):
    """Routers report the error of the server behind them with status 200."""
    busy = {"error": {"code": code, "message": "Provider returned error"}, **more}
    async with serving(busy, busy, reply('{"error"}')) as (endpoint, client):
        completion = await ask(client)
        assert (completion.message.content, completion.num_retries) == ('{"error"}', 2)
        completion = await ask(client)
    assert completion.num_retries == 0
    assert len(endpoint.requests) == 4


async def test_a_busy_server_behind_a_router_is_named_when_the_time_is_over():
    limits = RequestLimits(retry_budget_s=0.0)
    async with serving({"error": {"code": 429, "message": "slow"}}, limits=limits) as (_, client):
        with pytest.raises(EndpointError, match="200 and the error 429: slow") as refused:
            await ask(client)
    assert (refused.value.status, refused.value.is_transient) == (429, True)


async def test_retries_end_with_the_budget_and_name_the_status(clock):
    def busy(body):
        clock.now_s += 1.0
        return 503, "busy"

    async with serving(busy, limits=RequestLimits(retry_budget_s=3.5)) as (endpoint, client):
        with pytest.raises(EndpointError, match=r"503: busy.*4 times") as refused:
            await ask(client)
    assert (refused.value.status, len(endpoint.requests)) == (503, 4)


async def test_a_refused_request_is_not_repeated():
    async with serving(400) as (endpoint, client):
        with pytest.raises(EndpointError, match=r"answered 400: .*for its length"):
            await ask(client)
    assert len(endpoint.requests) == 1


MESSAGE = {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("<html>Bad gateway</html>", "not complete JSON .*<html>Bad gateway"),
        ('{"choices": [{"mess', "not complete JSON .*truncated"),
        ("", "not complete JSON .*nothing"),
        ({"error": {"message": "no credit"}}, "status 200 and the error: no credit"),
        ({"error": "no credit", "choices": []}, "the error: .*no credit"),
        (
            {
                "choices": [
                    {
                        "message": MESSAGE,
                        "finish_reason": "error",
                        "error": {"code": 502, "message": "gone"},
                    }
                ]
            },
            "the error 502: gone",
        ),
        ({"choices": [{"error": {"message": "gone"}}]}, "the error: gone"),
        ({"choices": [{}]}, "missing required field `message`"),
        (reply([{"type": "image_url", "image_url": {"url": "u"}}]), "type 'image_url'; expected"),
        ({"choices": []}, "without choices"),
        ({"choices": [{"message": None}]}, r"choices\[0\].message"),
        ({"choices": [{"message": {"content": 7}}]}, r"Expected `str .*message.content"),
        (
            {"choices": [{"message": MESSAGE, "finish_reason": "bored"}]},
            "'bored'; expected one of stop",
        ),
        ([1, 2], "Expected `object`, got `array`"),
    ],
)
async def test_an_answer_that_is_no_completion_names_the_address_and_what_came(answer, said):
    async with serving(answer) as (endpoint, client):
        with pytest.raises(EndpointError, match=rf"(?s)/v1/chat/completions .*{said}"):
            await ask(client)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize(
    ("half", "kept"),
    [
        (rb"\ud83d 3", "\ufffd 3"),
        (rb"\ude00 3", "\ufffd 3"),
        (b"\xed\xa0\xbd 3", "\ufffd 3"),
        (rb"\ud83d\ude00 3", "\U0001f600 3"),
        (rb"\\ud83d 3", r"\ud83d 3"),
    ],
)
async def test_half_of_a_surrogate_pair_is_replaced(half, kept):
    call = {"function": {"name": "f", "arguments": "HALF"}}
    body = json.dumps(reply("HALF", "tool_calls", tool_calls=[call]))
    message = read_completion(body.encode().replace(b"HALF", half), where="there").message
    assert (message.content, message.tool_calls[0].arguments) == (kept, kept)


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        (b'{"choices": [{"message": {"content": "\xff"}}]}', "not complete JSON"),
        (b'{"choices": [{"message": {"tool_calls": [{"function": {"arguments": "\xff"}}]}}]}', "J"),
        (b'{"choices": [{"message": 5}], "tr', "not a chat completion"),
    ],
)
def test_a_reply_with_broken_bytes_is_an_error_of_the_endpoint(body, fact):
    with pytest.raises(EndpointError, match=fact):
        read_completion(body, where="there")


async def read(content="5", finish_reason="stop", **message) -> Message:
    async with serving(reply(content, finish_reason, **message)) as (_, client):
        return (await ask(client)).message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}, ("42", "")),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "6 by 7"}]},
                         {"type": "text", "text": "42"}]},
            ("42", "6 by 7"),
        ),
        (
            {"reasoning_details": [{"type": "reasoning.summary", "summary": "2 "},
                                   {"type": "reasoning.text", "text": "and 3"},
                                   {"type": "reasoning.encrypted", "data": "x"}]},
            ("5", "2 and 3"),
        ),
        ({"reasoning": "sure", "reasoning_details": [{"text": "sure"}]}, ("5", "sure")),
        ({"content": [], "finish_reason": "eos"}, ("", "")),
    ],
)  # fmt: skip
async def test_parts_and_details_of_other_endpoints_are_read(message, expected):
    found = await read(**message)
    assert (found.content, found.reasoning) == expected


async def test_a_refusal_may_be_a_part():
    assert (await read([{"type": "refusal", "refusal": "I may not"}])).refusal == "I may not"


@pytest.mark.parametrize(
    ("function", "name", "arguments"),
    [
        (
            {"name": "add", "arguments": {"a": 1, "b": [None, 1.50]}},
            "add",
            '{"a":1,"b":[null,1.5]}',
        ),
        ({"name": "add", "arguments": '{"a":1}'}, "add", '{"a":1}'),
        ({"name": "add", "arguments": None}, "add", "{}"),
        ({"name": "add"}, "add", "{}"),
        ({"name": None, "arguments": '{"a":1}'}, "", '{"a":1}'),
        ({"arguments": {}}, "", "{}"),
    ],
)
async def test_calls_of_other_endpoints_are_read(function, name, arguments):
    for message in ({"tool_calls": [{"function": function}]}, {"function_call": function}):
        (call,) = (await read(None, **message)).tool_calls
        assert (call.name, call.arguments.replace(" ", "")) == (name, arguments)


@pytest.mark.parametrize(
    "call", [{}, {"type": ""}, {"type": "function"}, {"type": "function", "function": None}]
)
async def test_a_call_without_a_function_is_malformed(call):
    (found,) = (await read(None, tool_calls=[{"id": "c1", **call}])).tool_calls
    assert (found.name, found.arguments) == ("", "{}")


async def test_a_call_of_another_type_is_an_error_that_names_it():
    call = {"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    with pytest.raises(EndpointError, match=r"a call of type 'custom'; expected .* 'function'"):
        await read(None, tool_calls=[call])


@pytest.mark.parametrize("ids", [{}, {"id": None}, {"id": ""}, {"id": "same"}])
async def test_no_two_calls_share_an_id(ids):
    calls = [{"function": {"name": "add", "arguments": "{}"}, **ids}] * 2
    turns = [await read(None, tool_calls=calls) for _ in range(2)]
    made = [call.id for turn in turns for call in turn.tool_calls]
    assert len({*made}) == 4
    assert all(made)


async def test_tokens_are_asked_for_and_come_as_columns():
    answer = reply()
    answer["prompt_token_ids"] = [1, 2, 3]
    answer["choices"][0] |= {
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token": "he", "logprob": -0.5}, {"token": "y", "logprob": -2}]},
    }
    async with serving(answer, with_tokens=True) as (endpoint, client):
        completion = await ask(client)
        assert endpoint.requests[0]["logprobs"] is True
        assert endpoint.requests[0]["return_token_ids"] is True
    assert completion.prompt_ids == array("i", [1, 2, 3])
    assert completion.completion_ids == array("i", [7, 8])
    assert completion.logprobs == array("f", [-0.5, -2.0])
    assert (completion.num_prompt_tokens, completion.num_completion_tokens) == (3, 2)


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids", "logprobs"])
async def test_tokens_that_do_not_come_are_not_made_up(missing):
    answer = reply() | {"prompt_token_ids": [1]}
    answer["choices"][0] |= {"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}}
    (answer if missing in answer else answer["choices"][0])[missing] = None
    async with serving(answer, with_tokens=True) as (endpoint, client):
        with pytest.raises(EndpointError, match=r"prompt ids.*log-prob"):
            await ask(client)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("place", ["prompt_token_ids", "token_ids"])
async def test_an_id_that_no_tokenizer_has_is_an_answer_that_cannot_be_used(place):
    answer = reply() | {"prompt_token_ids": [1]}
    answer["choices"][0] |= {"token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}}
    (answer if place in answer else answer["choices"][0])[place] = [2**31]
    async with serving(answer, with_tokens=True) as (endpoint, client):
        with pytest.raises(EndpointError, match="32 bits"):
            await ask(client)
    assert len(endpoint.requests) == 1


async def test_clients_of_several_endpoints_share_connections():
    pool = HttpPool()
    async with serving(reply(), pool=pool) as (_, one), serving(reply(), pool=pool) as (_, other):
        await ask(one)
        await one.close()
        assert (await ask(other)).message.content == "hello"
        await pool.close()


async def test_cancelling_the_caller_cancels_the_request():
    async with serving("hang") as (endpoint, client):
        task = asyncio.create_task(ask(client))
        await asyncio.wait_for(endpoint.arrived.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(endpoint.dropped.wait(), 60)


async def test_nothing_listening_says_so():
    url = f"http://127.0.0.1:{free_port()}/v1"
    client = ChatClient(url, limits=RequestLimits(retry_budget_s=0.0))
    with pytest.raises(EndpointError, match=f"{url}/models") as refused:
        await client.check()
    assert refused.value.status is None, "nobody answered"
    await client.close()


async def test_model_must_be_named_when_several_are_served():
    async with serving(reply(), models=("a", "b")) as (_, client):
        assert await client.list_models() == ["a", "b"]
        with pytest.raises(ConfigError, match=r"serves 2 models \(a, b\); .*--model"):
            await ask(client)


async def test_unknown_model_names_the_nearest():
    for refusal in (404, (400, '{"error": "the model qwen-smal is not served"}')):
        async with serving(refusal, models=("qwen-small",), model="qwen-smal") as (_, client):
            with pytest.raises(UnknownNameError) as refused:
                await client.check()
        assert all(name in str(refused.value) for name in ("'qwen-smal'", "'qwen-small'"))


async def test_a_model_that_is_not_listed_is_used_if_the_endpoint_answers_for_it():
    async with serving(reply(), models=("qwen-small",), model="latest") as (endpoint, client):
        note = await client.check()
        assert all(name in note for name in ("'latest'", "qwen-small"))
        assert [one["max_tokens"] for one in endpoint.requests] == [1]
        assert (await ask(client)).message.content == "hello"
    async with serving(reply(), model="tiny") as (endpoint, client):
        assert await client.check() is None
        assert not endpoint.requests


@pytest.mark.parametrize(
    "listing", [(400, "x"), (403, "Missing scopes: models"), (200, '{"a": 1}')]
)
async def test_a_list_that_cannot_be_had_keeps_no_named_model_from_being_used(listing):
    async with serving(reply(), models=listing, model="tiny", api_key="k") as (_, client):
        assert await client.check() is None
    async with serving(reply(), models=listing) as (_, client):
        with pytest.raises(EndpointError, match="/v1/models answered"):
            await client.check()


async def test_a_list_of_models_may_be_bare():
    async with serving(reply(), models=(200, '[{"id": "a"}]')) as (_, client):
        assert await client.list_models() == ["a"]


async def test_the_first_choice_is_the_one_of_index_0():
    two = {**reply(), "choices": [{**reply()["choices"][0], "index": n} for n in (1, 0)]}
    two["choices"][0]["message"] = {"role": "assistant", "content": "the other"}
    failed = {"index": 0, "message": {}, "finish_reason": "error", "error": {"message": "gone"}}
    async with serving(two, {**two, "choices": [two["choices"][0], failed]}) as (_, client):
        assert (await ask(client)).message.content == "hello"
        with pytest.raises(EndpointError, match="the error: gone"):
            await ask(client)


async def test_an_endpoint_that_lists_no_models_is_asked_by_name():
    async with serving(reply(), models=None, model="tiny") as (_, client):
        await client.check()
        assert (await ask(client)).message.content == "hello"
    async with serving(reply(), models=None) as (_, client):
        with pytest.raises(EndpointError, match="/v1/models answered 404"):
            await client.check()


def test_base_url_needs_a_scheme():
    with pytest.raises(ConfigError, match=r"'localhost:8000/v1'.*http://"):
        ChatClient("localhost:8000/v1")
