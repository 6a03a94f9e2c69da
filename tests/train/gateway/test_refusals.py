"""What cannot be exact is refused by name with what to do, in the form of OpenAI's errors."""

from dataclasses import replace
from pathlib import Path

import openai
import pytest
from test_openai_client import ASK, TOOLS, client_of

from telescope_core.gateway.messages import read_messages
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import LABELS, READ, read_request
from telescope_core.gateway.request import NEUTRAL as NEUTRAL_VALUES
from telescope_core.types import Message, Sampling, ToolCall

OWN = Sampling(max_tokens=64, temperature=0.9, stop=("END",))
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NOTHING = {"refusal": None, "deep": [{"er": ""}, [], {}]}


def said(**fields):
    return {"role": "assistant", "content": "hi", **fields}


def called(*ids):
    calls = [{**CALL, "id": one} for one in ids]
    return said(content=None, tool_calls=calls)


def result(call_id):
    return {"role": "tool", "content": "3", "tool_call_id": call_id}


def read(own: Sampling = OWN, **given):
    return read_request({"model": "policy", "messages": ASK, **given}, own, model="policy")


def test_stop_texts_are_in_the_answer_as_the_run_or_the_request_says():
    kept = replace(OWN, include_stop_str_in_output=True)
    assert read(own=kept).sampling.include_stop_str_in_output
    # A text of the program's own ends its answers as the chat API says.
    assert not read(own=kept, stop=["\n"]).sampling.include_stop_str_in_output
    name = "include_stop_str_in_output"
    assert read(stop=["\n"], **{name: True}).sampling.include_stop_str_in_output
    assert not read(own=kept, **{name: False}).sampling.include_stop_str_in_output
    with pytest.raises(Refusal):
        read(**{name: "yes"})


REFUSED = [
    ({"n": 2}, "n", "ask several times"),
    ({"n": True}, "n", "ask several times"),
    ({"logit_bias": {"7": 1}}, "logit_bias", "leave it out"),
    ({"response_format": SCHEMA}, "response_format", "ask for the format in the prompt"),
    ({"response_format": {"type": "json_object"}}, "response_format", "in the prompt"),
    ({"echo": True}, "echo", "leave it out"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "leave it out"),
    ({"presence_penalty": 1}, "presence_penalty", "leave it out"),
    ({"logprobs": True}, "logprobs", "leave it out"),
    ({"top_logprobs": 3}, "top_logprobs", "leave it out"),
    ({"top_p": 0.9}, "top_p", "samples at 1"),
    ({"top_k": 40}, "top_k", "leave it out"),
    ({"min_p": 0.1}, "min_p", "leave it out"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "leave it out"),
    ({"temperature": 0}, "temperature", "leave it out for 0.9"),
    ({"temperature": "hot"}, "temperature", "a number from 0 to 2"),
    ({"temperature": True}, "temperature", "a number from 0 to 2"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens", "at least 1"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"stop": 3}, "stop", "a text or a list"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice", "use 'auto'"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", "use 'auto'"),
    ({"tool_choice": "any"}, "tool_choice", "'auto' or 'none'"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "as a function"),
    ({"tools": [{"name": "add"}]}, "tools[0]", "'function'"),
    ({"tools": {}}, "tools", "a list"),
    ({"functions": [{"name": "add"}]}, "functions", "use tools"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "template of the run"),
    ({"chat_template": "{{ x }}"}, "chat_template", "chat_template"),
    ({"modalities": ["text", "audio"]}, "modalities", "text alone"),
    ({"store": True}, "store", "leave it out"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "unless stream is true"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "leave it out"),
    ({"temprature": 0.3}, "temprature", "did you mean temperature"),
    ({"guided_json": {"type": "object"}}, "guided_json", "leave it out"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice", "smolagents, OpenAIModel("),
    ({"model": "gpt-4o"}, "model", "episode.endpoint"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "at least one"),
    ({"messages": ["hi"]}, "messages[0]", "role and content"),
    ({"messages": [{"role": "robot"}]}, "messages[0].role", "one of system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "text"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]", "text alone"),
    ({"messages": [{"role": "user", "content": "x", "name": "Al"}]}, "messages[0].name", "begin"),
    ({"messages": [said(name="Al"), said(name="Bo")]}, "messages[0].name", "begin the content"),
    ({"messages": [*ASK, said(name="Al"), {**ASK[0], "name": "Al"}]}, "messages[2].name", "begin"),
    ({"messages": [said(name=["Al"]), said(name="Al")]}, "messages[0].name", "begin"),
    ({"messages": [said(name="Al"), said()]}, "messages[0].name", "include_name_in_message=False"),
    ({"messages": [*ASK, result("nobody")]}, "messages[1].tool_call_id", "are none"),
    ({"messages": [called("a", "b"), result("c")]}, "messages[1].tool_call_id", "are 'a', 'b'"),
    ({"messages": [called("a", "b"), *map(result, "aa")]}, "messages[2].tool_call_id", "are 'b'"),
    (
        {"messages": [called("a"), result("a"), *ASK, result("a")]},
        "messages[3].tool_call_id",
        "none",
    ),
    ({"messages": [called("a"), *ASK, result("a")]}, "messages", "before messages[1] (user)"),
    ({"messages": [called("a"), called("b"), result("a")]}, "messages", "messages[1] (assistant)"),
    ({"messages": [called("a", "b"), result("b")]}, "messages", "before the answer"),
    ({"messages": [called(*map(str, range(9)))]}, "messages", "'0', '1', '2', '3', '4' and 4 more"),
    ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id", "the id"),
    ({"messages": [{"role": "tool", "id": "a"}]}, "messages[0].tool_call_id", "the id"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "leave it out",
    ),
    ({"messages": [said(contents="hi")]}, "messages[0].contents", "did you mean content"),
    ({"messages": [said(own={"content": "ho"})]}, "messages[0].own", "would not see it"),
    ({"messages": [said(seen={"a": [{"b": 0}]})]}, "messages[0].seen", "would not see it"),
    (
        {"messages": [said(tool_calls=[{**CALL, "signature": "x"}])]},
        "messages[0].tool_calls[0].signature",
        "would not see it",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "voice": "b"}]}]},
        "messages[0].content[0].voice",
        "would not see it",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0]",
        "arguments as JSON text",
    ),
]


@pytest.mark.parametrize(("given", "param", "advice"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_by_name_with_what_to_do(given, param, advice):
    with pytest.raises(Refusal) as caught:
        read(**given)
    assert caught.value.param == param
    assert advice in caught.value.message
    assert 400 <= caught.value.status < 500


NEUTRAL = [
    {"n": 1},
    {"logit_bias": {}},
    {"response_format": {"type": "text"}},
    {"frequency_penalty": 0, "presence_penalty": 0.0},
    {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
    {"logprobs": False, "top_logprobs": 0, "echo": False, "store": False},
    {"seed": None, "stop": None, "tools": None, "tool_choice": None, "max_tokens": None},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"tool_choice": "none"},
    {"stop": []},
    {"functions": [], "guided_json": {}, "extra": NOTHING, "modalities": [], "seed": ""},
    {"stream_options": None, "chat_template_kwargs": {"thinking": None}},
    {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto"},
    {"seed": 7},
    {"messages": [{**one, "name": one["role"], "cache_breakpoint": True} for one in ASK]},
    {"tool_choice": "none", "tools": TOOLS},
]


@pytest.mark.parametrize("given", NEUTRAL, ids=str)
def test_what_changes_nothing_is_taken(given):
    assert read(**given) == read()


def test_what_is_honoured():
    asked = read(temperature=0.3, max_tokens=9, stop=["a", "b"], tools=TOOLS, stream=True)
    assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.3, 9)
    assert (asked.sampling.stop, asked.stream, asked.include_usage) == (("a", "b"), True, False)
    assert asked.tools == tuple(TOOLS)
    assert [read(parallel_tool_calls=one).takes_one_call for one in (False, True)] == [True, False]
    assert read(max_tokens=900).sampling.max_tokens == 64
    assert read(max_tokens=9, max_completion_tokens=7).sampling.max_tokens == 7
    greedy = Sampling(max_tokens=4, temperature=0.0)
    assert read(greedy, temperature=0).sampling == greedy


def test_messages_are_read_as_the_template_sees_them():
    """Parts of a text are its lines; what the client calls developer is the system."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": parts, "tool_call_id": "c", "name": "f"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
    ]
    asked = ToolCall(id="c", name="f", arguments="{}")
    seen = (
        Message(role="system", content="be brief"),
        Message(role="user", content="a\nb"),
        Message(role="assistant", content="", tool_calls=(asked,)),
        Message(role="tool", content="a\nb", tool_call_id="c"),
        Message(role="assistant", content="x", reasoning="hm"),
    )
    assert read_messages(sent) == seen


def test_the_name_of_the_only_assistant_tells_nothing_apart():
    sent = [*ASK, said(name="adder"), *ASK, said(name="adder")]
    assert read_messages(sent) == read_messages([*ASK, said(), *ASK, said()])


def test_results_are_shown_in_the_order_of_their_calls():
    sent = [called("a", "b", "c"), *map(result, "cab"), called("b"), result("b"), *ASK]
    ids = [message.tool_call_id for message in read_messages(sent)]
    assert ids == [None, "a", "b", "c", None, "b", None]
    # Endpoints that number calls anew in each turn, or give two of one turn the same id.
    twice = [called("a", "a"), {**result("a"), "content": "1"}, {**result("a"), "content": "2"}]
    assert [message.content for message in read_messages(twice)] == ["", "1", "2"]


def test_fields_of_messages_that_add_nothing_are_ignored_at_any_depth():
    """litellm sends a follow-up turn like this, with what it made of the answer before."""
    call = {**CALL, "index": 0, "provider_specific_fields": NOTHING}
    call["function"] = {**CALL["function"], "provider_specific_fields": None}
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]},
        said(
            reasoning_content="hm",
            provider_specific_fields={**NOTHING, "reasoning_content": "hm"},
            tool_calls=[call],
            audio=None,
        ),
        {"role": "tool", "content": "3", "tool_call_id": "c", "provider_specific_fields": {}},
    ]
    plain = [
        {"role": "user", "content": "a"},
        said(reasoning_content="hm", tool_calls=[CALL]),
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    assert read_messages(sent) == read_messages(plain)


async def test_no_null_is_answered_that_clients_would_send_back(serve):
    rollout = serve("2")
    async with client_of(rollout) as client:
        reply = await client.chat.completions.with_raw_response.create(model="policy", messages=ASK)
    message = reply.http_response.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "2"}


async def test_the_client_gets_the_refusal_and_nothing_is_asked(serve):
    rollout = serve("2")
    async with client_of(rollout) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=ASK, n=2)
        assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError, match="chat completions"):
            await client.completions.create(model="policy", prompt="hi")
        with pytest.raises(openai.NotFoundError, match="anthropic_base_url"):
            await client.post("/v1/messages", cast_to=object)
        with pytest.raises(openai.NotFoundError, match="which ends in /v1"):
            await client.post(f"{str(client.base_url)[:-3]}messages", cast_to=object)
        with pytest.raises(openai.NotFoundError, match="'other'"):
            await client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="is not JSON"):
            await client.post("/chat/completions", content=b"{", cast_to=object)
        with pytest.raises(openai.BadRequestError, match="is not JSON"):
            await client.post("/chat/completions", content=b'{"a": "\xff"}', cast_to=object)
    assert rollout.pool.prompts == []
    assert rollout.policy.turns == []


async def test_a_conversation_that_is_too_long_is_told_as_openai_tells_it(serve):
    rollout = serve("2", max_model_len=13, sampling=Sampling(max_tokens=4))
    async with client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK)
        grown = [*ASK, {"role": "assistant", "content": "2"}, {"role": "user", "content": ""}]
        assert reply.choices[0].message.content == "2"
        shorter = await client.chat.completions.create(model="policy", messages=grown)
        assert shorter.usage.completion_tokens == rollout.pool.sampling[1].max_tokens == 1
        grown[-1]["content"] = "and then?"
        with pytest.raises(openai.BadRequestError, match=r"\b13\b.*shorter history") as caught:
            await client.chat.completions.create(model="policy", messages=grown)
    assert caught.value.code == "context_length_exceeded"


async def test_what_the_template_refuses_is_the_callers_doing(serve):
    rollout = serve("2")
    async with client_of(rollout) as client:
        late = [*ASK, {"role": "system", "content": "Be brief."}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=late)
    assert caught.value.param == "messages"


def test_the_reference_names_every_parameter():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "gateway.md").read_text()
    missing = [name for name in (*READ, *NEUTRAL_VALUES, *LABELS) if f"`{name}`" not in page]
    assert missing == ["messages"]
