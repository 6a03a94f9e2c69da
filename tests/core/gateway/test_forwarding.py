"""The endpoint of a rollout in an eval: what a program asks is passed on, answered and recorded."""

import asyncio
import json
import re
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from tests.core.one_rollout import let_time_pass, wait_for_ever

from telescope_core import (
    Environment,
    Example,
    Message,
    StopReason,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.chat import http
from telescope_core.chat.http import RequestLimits
from telescope_core.errors import EndpointError
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.evals.result import count_lines
from telescope_core.examples import GeneratedSource
from telescope_core.gateway import RecordedEnvironment, forwarding
from telescope_core.gateway.messages import read_loosely
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records.rows import row_from_json, row_to_json
from telescope_core.reports.rollouts_html import Pictures, sample
from telescope_core.types import Sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))
from loopback_endpoint import ASK, reply, serving

SETTINGS = EvalSettings(
    num_examples=1,
    rollouts=1,
    sampling=Sampling(max_tokens=50, temperature=0.5, stop=("END",), extra={"top_k": 5}),
    max_retries=0,
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


class Agent(Environment):
    """Runs `program(client, model)` and keeps what it returns as the answer."""

    program = None

    def examples(self, split):
        return GeneratedSource(lambda random, index: Example(id=str(index), prompt="hi"), seed="x")

    async def play(self, episode):
        endpoint = episode.endpoint
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            said = await type(self).program(client, endpoint.model)
        episode.add(Message(role="assistant", content=said or ""))
        return StopReason.COMPLETED

    @reward
    def answered(self, rollout, example):
        return float(rollout.completion_text == "fine")


@asynccontextmanager
async def evaluated(program, *script, settings=SETTINGS, **options):
    """Evaluate `program` against an endpoint with `script`; yields endpoint, result, row, notes."""

    class Played(Agent):
        pass

    Played.program = staticmethod(program)
    rows, notes = [], []
    async with serving(*script, **options) as (endpoint, client):
        environment = RecordedEnvironment(
            InProcessEnvironment(Played(), name="agent"), note=notes.append
        )
        async with forwarding(client) as policies:
            result = await run_eval(environment, policies, settings, on_rollout=rows.append)
        kept = row_from_json(json.loads(json.dumps(row_to_json(rows[0]))))
        yield endpoint, result, kept, notes


async def three_turns(client, model):
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        answer = await client.chat.completions.create(model=model, messages=messages)
        said = answer.choices[0].message
        messages += [said, {"role": "user", "content": "and then?"}]
    return said.content


async def test_an_agent_in_a_process_behind_a_proxy_reaches_its_endpoint(monkeypatch):
    """Programs of one's own have no command line before them that would except this machine."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with evaluated(three_turns, reply("a"), reply("b"), reply("fine")) as (_, _, row, _):
        assert (row.reward, row.num_turns) == (1.0, 3)


TOOL = {
    "type": "function",
    "function": {"name": "look<b>", "description": "Look.", "parameters": {"type": "object"}},
}


async def test_the_tools_that_a_program_offered_are_in_its_record():
    async def program(client, model):
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        await client.chat.completions.create(**asked, tools=[TOOL])
        return (await client.chat.completions.create(**asked)).choices[0].message.content

    async with evaluated(program, reply("one"), reply("fine")) as (_, _, row, _):
        assert row.tools == (TOOL,)
    assert "tools that the model was offered</span><pre>look&lt;b&gt;</pre>" in sample(
        row, Pictures()
    )


class Shelf(ToolEnvironment):
    """Offers a tool, which nobody calls."""

    def examples(self, split):
        return GeneratedSource(lambda random, index: Example(id=str(index), prompt="hi"), seed="x")

    @tool
    def take(self, name: str) -> str:
        """Take a book."""
        return name

    @reward
    def answered(self, rollout, example):
        return float(rollout.completion_text == "fine")


async def test_the_tools_of_an_environment_are_in_the_record_of_an_eval():
    rows = []
    async with serving(reply("fine")) as (endpoint, client), forwarding(client) as policies:
        environment = RecordedEnvironment(
            InProcessEnvironment(Shelf.from_settings({"tool_call_format": "native"}), name="shelf"),
            note=print,
        )
        await run_eval(environment, policies, SETTINGS, on_rollout=rows.append)
    (offered,) = endpoint.requests[0]["tools"]
    assert rows[0].tools == (offered,)
    assert offered["function"]["name"] == "take"


async def test_an_agent_in_an_eval_is_recorded_as_in_training():
    async with evaluated(three_turns, reply("one"), reply("two"), reply("fine")) as (
        endpoint,
        result,
        row,
        notes,
    ):
        first, *_, last = endpoint.requests
    assert (row.num_turns, row.num_prompt_tokens, row.num_completion_tokens) == (3, 15, 6)
    assert (row.reward, result.mean_completion_tokens, notes) == (1.0, 6.0, [])
    assert row.finish_reasons == ("stop", "stop", "stop")
    assert row.generate_s > 0
    (conversation,) = row.conversations
    assert [message.content for message in conversation] == [
        *("hi", "one", "and then?", "two", "and then?", "fine")
    ]
    assert "and then?" in sample(row, Pictures())
    # What the program left out is that of the eval.
    assert first == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 50,
        "temperature": 0.5,
        "stop": ["END"],
        "top_k": 5,
    }
    assert len(last["messages"]) == 5


USED = {"prompt_tokens": 7, "completion_tokens": 3}


@pytest.mark.parametrize(
    ("script", "counts"),
    [
        ((reply("one"), {"choices": [], "usage": USED}), (12, 5)),
        ((reply("one"), reply("two", "odd") | {"usage": USED}), (12, 5)),
        ((reply("one"), {"choices": []}), (None, None)),
        ((reply("one"), {"error": {"code": 502, "message": "away"}}), (5, 2)),
        ((reply("one"), (400, "no")), (5, 2)),
        ((reply("one"), 503), (5, 2)),
        ((reply("one"), "drop"), (None, None)),
        ((reply("one"), "<html>"), (None, None)),
        (("hang",), (None, None)),
    ],
)
async def test_tokens_of_a_request_without_a_usable_answer_are_counted(script, counts):
    limits = RequestLimits(request_timeout_s=0.05 if "hang" in script else 60.0, retry_budget_s=0.0)
    async with evaluated(three_turns, *script, limits=limits) as (_, result, row, _):
        pass
    assert row.status == "failed"
    assert (row.num_prompt_tokens, row.num_completion_tokens) == counts
    assert (result.num_prompt_tokens, result.num_completion_tokens) == counts
    assert (result.mean_prompt_tokens, result.mean_completion_tokens) == (None, None)
    assert "; - tokens each; " in count_lines(result)[0]


async def test_tokens_of_a_request_that_a_deadline_ended_are_not_known():
    def late(body):
        let_time_pass()
        return "hang"

    settings = replace(SETTINGS, deadline_s=60.0)
    async with evaluated(three_turns, reply("one"), late, settings=settings) as (_, _, row, _):
        pass
    assert (row.stop_reason, row.num_turns) == (StopReason.TIMEOUT, 1)
    assert (row.num_prompt_tokens, row.num_completion_tokens) == (None, None)


async def test_everything_that_can_be_recorded_is_passed_on_as_it_is():
    linked = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    parts = [{"type": "text", "text": "what is it?"}, IMAGE, linked]
    asked = [{"role": "user", "content": parts, "name": "Al"}]

    async def program(client, model):
        answer = await client.chat.completions.create(
            model=model,
            messages=asked,
            temperature=0,
            max_completion_tokens=7,
            tool_choice="required",
            tools=[{"type": "function", "function": {"name": "add"}}],
            response_format={"type": "json_object"},
            seed=3,
            extra_body={"guided_json": {"type": "object"}},
        )
        return answer.choices[0].message.content

    async with evaluated(program, reply("fine")) as (endpoint, _, row, _):
        (sent,) = endpoint.requests
    assert row.error is None
    assert sent["messages"] == asked
    assert (sent["temperature"], sent["max_completion_tokens"]) == (0, 7)
    assert "max_tokens" not in sent
    assert (sent["tool_choice"], sent["seed"]) == ("required", 3)
    assert sent["guided_json"] == {"type": "object"}
    assert row.conversations[0][0].content == (
        "what is it?\n[image_url]\n[image_url https://example.org/a.png]"
    )


async def test_each_request_has_a_seed_that_follows_from_the_seed_of_the_eval():
    async def seeds(seed):
        sampling = replace(SETTINGS.sampling, seed=seed)
        script = (reply("one"), reply("two"), reply("fine"))
        asking = evaluated(three_turns, *script, settings=replace(SETTINGS, sampling=sampling))
        async with asking as (endpoint, *_):
            return [request["seed"] for request in endpoint.requests]

    first, again, neighbor = await seeds(3), await seeds(3), await seeds(4)
    assert first == again
    assert len({*first, *neighbor}) == 6
    assert all(0 <= seed < 2**31 for seed in first)


async def test_a_program_that_speaks_anthropic_is_passed_on_as_a_chat_request():
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image", "source": source}]
    tool = {"name": "add", "input_schema": {"type": "object"}}
    asked = [{"role": "user", "content": parts}]

    async def program(client, model):
        address = str(client.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(
            base_url=address, api_key=client.api_key, max_retries=0
        ) as other:
            with pytest.raises(anthropic.NotFoundError, match="counted in training alone"):
                await other.messages.count_tokens(model=model, messages=asked)
            answer = await other.messages.create(
                model=model,
                max_tokens=7,
                system="be brief",
                messages=asked,
                tools=[tool],
                tool_choice={"type": "any"},
                stop_sequences=["."],
            )
        assert (answer.usage.input_tokens, answer.stop_reason) == (5, "tool_use")
        call = answer.content[-1]
        return "fine" if (call.name, call.input) == ("add", {"a": 1}) else ""

    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    script = reply("", "tool_calls", tool_calls=calls)
    async with evaluated(program, script) as (endpoint, _, row, _):
        (sent,) = endpoint.requests
    assert (row.reward, row.num_turns) == (1.0, 1), row.error
    url = {"url": "data:image/png;base64,iVBORw0KGgo="}
    assert sent["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [parts[0], {"type": "image_url", "image_url": url}]},
    ]
    assert (sent["max_tokens"], sent["tool_choice"], sent["stop"]) == (7, "required", ["."])
    assert sent["tools"] == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    ]


DETAILS = {
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
NO_DETAILS = {
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
APIS = [
    ("chat/completions", {}),
    ("responses", {"messages": None, "input": "hi"}),
    ("messages", {}),
]


async def used(client, path, body, stream):
    """Return the usage of an answer to `body`, from the last event of a stream that has one."""
    if not stream:
        return (await client.post(path, body=body, cast_to=httpx.Response)).json()["usage"]
    options = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    body = {**body, "stream": True, **options}
    answer = await client.post(path, body=body, cast_to=httpx.Response)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "usage" in line]
    last = json.loads(lines[-1])
    return last.get("response", last)["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("details", "chat", "cached", "thought"),
    [
        ({}, {}, 0, 0),
        ({"prompt_tokens_details": None, "completion_tokens_details": "?"}, {}, 0, 0),
        ({"prompt_tokens_details": {"cached_tokens": 6}}, {}, 0, 0),
        (DETAILS, DETAILS, 4, 1),
        (NO_DETAILS, NO_DETAILS, 0, 0),
    ],
)
async def test_cached_and_thinking_tokens_are_those_of_the_endpoint(
    details, chat, cached, thought, stream
):
    async def program(client, model):
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        counted = [await used(client, f"/{path}", {**asked, **more}, stream) for path, more in APIS]
        of_chat, of_responses, of_anthropic = counted
        assert {name: of for name, of in of_chat.items() if name.endswith("details")} == chat
        assert of_responses["input_tokens_details"]["cached_tokens"] == cached
        assert of_responses["output_tokens_details"] == {"reasoning_tokens": thought}
        assert of_responses["input_tokens"] == 5
        assert of_anthropic["cache_read_input_tokens"] == cached
        assert of_anthropic["input_tokens"] == 5 - cached
        return "fine"

    answer = reply("fine")
    answer["usage"] |= details
    async with evaluated(program, answer) as (_, _, row, _):
        pass
    assert row.reward == 1.0, row.error
    assert row.num_prompt_tokens == 15


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_the_endpoint_does_not_count_are_unknown_to_programs(stream):
    async def program(client, model):
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        counted = [await used(client, f"/{path}", {**asked, **more}, stream) for path, more in APIS]
        assert counted[:2] == [None, None]
        assert counted[2]["output_tokens"] == 0  # whose clients require a number
        return "fine"

    answer = reply("fine")
    del answer["usage"]
    async with evaluated(program, answer) as (_, _, row, _):
        pass
    assert row.reward == 1.0, row.error
    assert row.num_prompt_tokens is None


async def test_allowed_tools_of_responses_are_passed_on_in_the_form_of_the_chat_api():
    async def program(client, model):
        named = {"type": "function", "name": "f"}
        answer = await client.responses.create(
            model=model,
            input="hi",
            tools=[{**named, "parameters": {"type": "object"}}],
            tool_choice={"type": "allowed_tools", "mode": "required", "tools": [named]},
        )
        return answer.output_text

    async with evaluated(program, reply("fine")) as (endpoint, _, row, _):
        (sent,) = endpoint.requests
    assert row.reward == 1.0, row.error
    function = {"type": "function", "function": {"name": "f"}}
    allowed = {"mode": "required", "tools": [function]}
    assert sent["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}


async def test_what_is_empty_is_not_passed_on_to_an_endpoint_that_refuses_it():
    call = {"name": "f", "arguments": "{}", "call_id": "c"}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}

    async def program(client, model):
        await client.responses.create(
            model=model,
            input=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "ho"},
                {"type": "function_call", **call},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"role": "assistant", "content": "one"},
                {"role": "user", "content": "more"},
            ],
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=False,
        )
        results = [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]
        await client.post(
            "/messages",
            body={
                "model": model,
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": [{"type": "text", "text": "ho"}, use]},
                    {"role": "user", "content": results},
                    {"role": "assistant", "content": "one"},
                    {"role": "user", "content": "more"},
                ],
                "stop_sequences": [],
                "tools": [],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            cast_to=httpx.Response,
        )
        return "fine"

    async with evaluated(program, reply("fine"), reply("fine")) as (endpoint, _, row, _):
        sent = list(endpoint.requests)
    assert row.reward == 1.0, row.error
    function = {"name": "f", "arguments": "{}"}
    for one in sent:
        assert one["messages"] == [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "ho",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "more"},
        ]
        assert not {"tools", "tool_choice", "parallel_tool_calls"} & one.keys()
        assert one["stop"] == ["END"], "that of the eval"


async def test_half_of_a_surrogate_pair_is_mended_on_the_way_to_the_endpoint():
    async def program(client, model):
        said = rb'{"role": "user", "content": "cut \ud83d, whole \ud83d\udc22"}'
        body = b'{"model": "%s", "messages": [%s]}' % (model.encode(), said)
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(headers=headers) as plain:
            answer = await plain.post(f"{client.base_url}chat/completions", content=body)
        return answer.json()["choices"][0]["message"]["content"]

    async with evaluated(program, reply("fine")) as (endpoint, _, row, _):
        (sent,) = endpoint.requests
    assert row.reward == 1.0, row.error
    text = "cut \N{REPLACEMENT CHARACTER}, whole \N{TURTLE}"
    assert sent["messages"] == [{"role": "user", "content": text}]
    assert row.conversations[0][0].content == text


async def test_the_detail_of_a_picture_is_passed_on():
    async def program(client, model):
        parts = [
            {"type": "input_image", "image_url": "data:,", "detail": "low"},
            {"type": "input_image", "image_url": "data:,"},
        ]
        answer = await client.responses.create(
            model=model, input=[{"role": "user", "content": parts}]
        )
        return answer.output_text

    async with evaluated(program, reply("fine")) as (endpoint, _, row, _):
        (sent,) = endpoint.requests
    assert row.reward == 1.0, row.error
    low, other = (part["image_url"] for part in sent["messages"][0]["content"])
    assert (low, other) == ({"url": "data:,", "detail": "low"}, {"url": "data:,"})


def test_arguments_that_are_an_object_are_recorded_as_json():
    given = [{"a": "\u017c", "b": [True, None]}, '{"a":1}', None]
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": one}}
        for one in given
    ]
    (message,) = read_loosely([{"role": "assistant", "content": "", "tool_calls": calls}])
    told = [call.arguments for call in message.tool_calls]
    assert told == ['{"a": "\u017c", "b": [true, null]}', '{"a":1}', "{}"]


async def test_the_limit_of_the_eval_holds_for_programs_too():
    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model=model, messages=ask, max_tokens=5000)
        return "fine"

    async with evaluated(program, reply("x", "length")) as (endpoint, result, row, _):
        assert endpoint.requests[0]["max_tokens"] == 50
    assert (result.num_truncated, row.finish_reasons) == (1, ("length",))


async def test_a_stream_is_answered_in_the_same_words():
    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(
            model=model, messages=ask, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 2
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    async with evaluated(program, reply("fine")) as (endpoint, _, row, _):
        assert "stream" not in endpoint.requests[0]
    assert (row.reward, row.num_turns) == (1.0, 1)


FUNCTION = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CUSTOM = {"type": "custom", "custom": {"name": "sh", "input": "ls"}}
CALLED = [
    {"role": "assistant", "tool_calls": [FUNCTION, {"id": "2", **CUSTOM}]},
    {"role": "tool", "tool_call_id": "1", "content": "1"},
    {"role": "tool", "tool_call_id": "2", "content": "2"},
]
LOGPROB = {"token": "fine", "logprob": -0.5, "bytes": [102], "top_logprobs": []}


def with_logprobs(*entries):
    answer = reply("fine")
    answer["choices"][0]["logprobs"] = {"content": [*entries], "refusal": None}
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_logprobs_are_passed_on_and_come_back(api, stream):
    async def chat(client, model):
        ask = [{"role": "user", "content": "hi"}]
        asked = {"model": model, "messages": ask, "logprobs": True, "top_logprobs": 0}
        if not stream:
            return (await client.chat.completions.create(**asked)).choices[0].logprobs
        async with client.chat.completions.stream(**asked) as events:
            return (await events.get_final_completion()).choices[0].logprobs

    async def responses(client, model):
        asked = {"input": "hi", "include": ["message.output_text.logprobs"], "model": model}
        if not stream:
            answer = await client.responses.create(**asked)
        else:
            async with client.responses.stream(**asked) as events:
                seen = [event async for event in events]
            (delta,) = (one for one in seen if one.type == "response.output_text.delta")
            assert [one.token for one in delta.logprobs] == ["fine"]
            answer = seen[-1].response
        (item,) = answer.output
        return item.content[0]

    async def program(client, model):
        said = await (chat if api == "chat" else responses)(client, model)
        found = said.content if api == "chat" else said.logprobs
        assert [one.model_dump() for one in found] == [LOGPROB]
        return "fine"

    async with evaluated(program, with_logprobs(LOGPROB)) as (endpoint, _, row, _):
        (sent,) = endpoint.requests
    assert row.reward == 1.0, row.error
    assert sent["logprobs"] is True
    assert "include" not in sent


async def test_turns_do_not_keep_the_logprobs_of_an_endpoint():
    async with serving(with_logprobs(LOGPROB)) as (_, client), forwarding(client) as policies:
        policy = policies.policy("r", SETTINGS.sampling)
        completion = await policy.complete(ASK, SETTINGS.sampling)
    assert json.loads(completion.logprobs_json) == {"content": [LOGPROB], "refusal": None}
    assert policy.turns[0].completion.logprobs_json == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "a request gets one answer"),
        ({"modalities": ["text", "audio"]}, "text alone"),
        ({"model": "other"}, "there is no model 'other' here"),
        ({"tools": [CUSTOM]}, r"tools\[0\].type: 'custom' is not run here"),
        ({"messages": CALLED}, r"messages\[0\].tool_calls\[1\].type: a call of type 'custom'"),
    ],
)
async def test_what_cannot_be_recorded_is_refused_by_name(fields, said):
    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.APIStatusError, match=said):
            await client.chat.completions.create(**{"model": model, "messages": ask, **fields})
        answer = await client.chat.completions.create(model=model, messages=ask)
        return answer.choices[0].message.content

    async with evaluated(program, reply("fine")) as (endpoint, _, row, _):
        assert len(endpoint.requests) == 1
    assert row.reward == 1.0


async def test_what_the_endpoint_refuses_the_program_hears_in_its_words():
    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="no such thing"):
            await client.chat.completions.create(model=model, messages=ask)
        return (
            (await client.chat.completions.create(model=model, messages=ask))
            .choices[0]
            .message.content
        )

    script = (lambda body: (400, "no such thing")), reply("fine")
    async with evaluated(program, *script) as (_, _, row, _):
        pass
    assert (row.reward, row.num_turns) == (1.0, 1)


async def test_a_program_that_copes_with_a_refusal_is_scored():
    async def program(client, model):
        ask = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model=model, messages=[{"role": "user", "content": "much too long"}])
        assert caught.value.code == "context_length_exceeded"
        return (
            (await ask(model=model, messages=[{"role": "user", "content": "short"}]))
            .choices[0]
            .message.content
        )

    script = (lambda body: (400, "maximum context length is 8 tokens")), reply("fine")
    async with evaluated(program, *script) as (_, result, row, notes):
        pass
    assert (row.reward, row.num_turns, result.num_failed, notes) == (1.0, 1, 0, [])


async def test_an_endpoint_that_fails_fails_the_rollout_even_where_the_program_goes_on():
    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=model, messages=ask)
        return "fine"

    limits = RequestLimits(retry_budget_s=0.0)
    async with evaluated(program, 500, limits=limits) as (_, result, row, _):
        pass
    assert (result.num_failed, row.status_reason, row.reward) == (1, "EndpointError", None)
    assert "answered 500" in row.error


@pytest.mark.slow
async def test_thinking_that_a_program_leaves_out_is_noted_once():
    async def program(client, model):
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            answer = await client.chat.completions.create(model=model, messages=messages)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        return said

    thinking = reply("fine", reasoning_content="hm")
    many = EvalSettings(num_examples=3, rollouts=2, sampling=Sampling(max_tokens=5))
    async with evaluated(program, thinking, settings=many) as (_, _, row, notes):
        pass
    assert len(notes) == 1
    assert "leaves out the thinking of earlier turns (reasoning_content)" in notes[0]
    (conversation,) = row.conversations
    assert [m.reasoning for m in conversation if m.role == "assistant"] == ["hm"] * 3


async def test_sub_agents_are_conversations_of_their_own():
    async def program(client, model):
        ask = client.chat.completions.create
        histories = [[{"role": "user", "content": f"part {number}"}] for number in range(3)]
        await asyncio.gather(*(ask(model=model, messages=messages) for messages in histories))
        return "fine"

    async with evaluated(program, reply("ok")) as (_, _, row, _):
        pass
    assert row.num_turns == 3
    assert sorted(one[0].content for one in row.conversations) == ["part 0", "part 1", "part 2"]


@pytest.mark.slow
async def test_the_cause_of_a_deadline_is_the_trouble_of_the_endpoint():
    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model=model, messages=ask)

    num_asked = 0

    def busy(body):
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            let_time_pass()
        return 503, "busy"

    settings = EvalSettings(
        num_examples=1, rollouts=1, sampling=Sampling(max_tokens=5), deadline_s=60.0
    )
    async with evaluated(program, busy, settings=settings) as (_, result, row, _):
        pass
    assert row.stop_reason is StopReason.TIMEOUT
    assert "answered 503: busy" in row.error
    assert (row.num_http_retries, result.num_http_retries) == (1, 1)


@pytest.mark.parametrize("last", [400, "no JSON"])
async def test_requests_that_failed_in_the_end_count_those_sent_again(last, monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.005)

    async def program(client, model):
        ask = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model=model, messages=ask)

    async with evaluated(program, 503, "drop", last) as (endpoint, result, row, _):
        assert len(endpoint.requests) == 3
    assert (row.status, row.num_http_retries, result.num_http_retries) == ("failed", 2, 2)


@pytest.mark.parametrize(("status", "num_attempts"), [(400, 1), (503, 2)])
async def test_a_request_that_is_refused_for_what_the_model_said_is_final(status, num_attempts):
    class Asks(Environment):
        def examples(self, split):
            return [Example(id="x", prompt="hi")]

        async def play(self, episode):
            await episode.generate()
            try:
                await episode.generate()
            except EndpointError as error:
                # As it comes to a worker, which knows the message alone.
                raise EndpointError(str(error)) from None

        @reward
        def answered(self, rollout, example):
            return 1.0

    def answer(body):
        return reply("fine") if len(body["messages"]) == 1 else (status, "no")

    settings = replace(SETTINGS, max_retries=1)
    async with serving(answer, limits=RequestLimits(retry_budget_s=0)) as (endpoint, client):
        environment = RecordedEnvironment(InProcessEnvironment(Asks(), name="asks"))
        async with forwarding(client) as policies:
            result = await run_eval(environment, policies, settings)
    assert result.num_failed == 1
    assert len(endpoint.requests) == 2 * num_attempts


async def test_a_program_that_asks_for_nothing_earns_no_reward():
    async def silent(client, model):
        return "fine"

    async with evaluated(silent, reply("fine")) as (_, result, row, _):
        assert (result.num_scored, result.num_failed) == (0, 1)
    assert row.reward is None
    assert "its program ended without an answer of the model" in row.error


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("chat/completions", {"n": 2}, "the last request that was refused: n: "),
        ("chat/completions", {"model": "gpt"}, "last request that was refused: there is no model"),
        ("completions", {}, "there is no POST /completions here"),
        ("chat/completions", {"top_k": -7}, "the last request that was refused: .*no such value"),
    ],
)
async def test_a_program_that_swallows_a_refusal_fails_with_the_refusal(path, asked, said):
    async def swallows(client, model):
        fields = {"model": model, "messages": [{"role": "user", "content": "hi"}], **asked}
        with suppress(openai.APIStatusError):
            await client.post(f"/{path}", body=fields, cast_to=object)
        with suppress(openai.APIStatusError):
            await client.post("/messages/count_tokens", body=fields, cast_to=object)
        return "fine"

    async with evaluated(swallows, (400, "no such value")) as (_, _, row, _):
        pass
    assert row.reward is None
    assert re.search(said, row.error)


async def test_a_refusal_that_a_program_goes_on_after_is_noted_once():
    async def goes_on(client, model):
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        said = (await client.chat.completions.create(**asked)).choices[0].message.content
        with suppress(openai.BadRequestError):
            await client.chat.completions.create(**asked, n=2)
        return said

    many = EvalSettings(num_examples=2, rollouts=2, sampling=Sampling(max_tokens=5))
    async with evaluated(goes_on, reply("fine"), settings=many) as (_, result, row, notes):
        pass
    assert (row.reward, result.num_scored) == (1.0, 4)
    (note,) = notes
    assert "went on after a request was refused, and its reward counts: n: " in note


async def test_a_program_that_hangs_after_a_refusal_fails_with_the_refusal():
    async def hangs(client, model):
        with suppress(openai.BadRequestError):
            ask = [{"role": "user", "content": "hi"}]
            await client.chat.completions.create(model=model, messages=ask, n=2)
        await wait_for_ever()

    settings = replace(SETTINGS, deadline_s=60.0)
    async with evaluated(hangs, reply("fine"), settings=settings) as (_, _, row, _):
        pass
    assert row.stop_reason is StopReason.TIMEOUT
    assert "; the last request that was refused: n: " in row.error
