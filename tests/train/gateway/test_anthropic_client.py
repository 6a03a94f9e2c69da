"""The `anthropic` client as it comes: what it sends is read, what it gets is what it expects."""

import contextlib
import json
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_openai_client import TWO_CALLS, as_rollout
from test_openai_client import client_of as openai_client_of

from telescope_core.gateway.anthropic_reply import message_json
from telescope_core.gateway.anthropic_request import read_anthropic
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import read_request
from telescope_core.types import Completion, Message, Sampling, ToolCall
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.chat.formats import same_message

ASK: list[dict[str, Any]] = [{"role": "user", "content": "1+1="}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
TOOLS = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
OWN = Sampling(max_tokens=64, temperature=0.9)


def client_of(rollout, **options) -> anthropic.AsyncAnthropic:
    endpoint = rollout.endpoint
    options = {"max_retries": 0, "api_key": endpoint.api_key, **options}
    return anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, **options)


async def asked(client, *, streamed: bool = False, **fields) -> anthropic.types.Message:
    fields = {"model": "policy", "max_tokens": 400, **fields}
    if not streamed:
        return await client.messages.create(**fields)
    async with client.messages.stream(**fields) as stream:
        return await stream.get_final_message()


def require_trained_once(rollout, num_samples: int) -> None:
    """Each sampled token is trained on once, in its order, and no other token."""
    samples = samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)
    assert len(samples) == num_samples
    trained = [one for sample in samples for one in sample.token_ids[sample.mask].tolist()]
    turns = rollout.policy.turns
    assert trained == [one for turn in turns for one in turn.completion.completion_ids]
    for turn, prompt in zip(turns, rollout.pool.prompts, strict=True):
        assert tuple(turn.completion.prompt_ids) == prompt


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_with_usage_and_its_record(serve, streamed):
    rollout = serve(f"<think>hm</think>so{TWO_CALLS}")
    async with client_of(rollout) as client:
        reply = await asked(client, streamed=streamed, messages=ASK, tools=TOOLS)
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).display_name == "policy"
    thinking, text, *calls = reply.content
    assert (thinking.thinking, bool(thinking.signature), text.text) == ("hm", True, "so")
    assert [(call.name, call.input) for call in calls] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ]
    assert (reply.stop_reason, reply.stop_sequence) == ("tool_use", None)
    (turn,) = rollout.policy.turns
    assert reply.usage.input_tokens == len(turn.completion.prompt_ids)
    assert reply.usage.output_tokens == len(turn.completion.completion_ids)
    assert reply.usage.cache_read_input_tokens == reply.usage.cache_creation_input_tokens == 0


async def test_a_stream_has_the_events_in_order(serve):
    rollout = serve("<think>hm</think>2")
    async with client_of(rollout) as client:
        stream = await client.messages.create(
            model="policy", max_tokens=50, messages=ASK, stream=True
        )
        kinds = [event.type async for event in stream]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [*block[:2], *block[1:]]
    ended = ["message_delta", "message_stop"]
    assert [kind for kind in kinds if kind != "ping"] == [
        "message_start",
        *thinking,
        *block,
        *ended,
    ]


async def test_why_an_answer_ended(serve):
    rollout = serve("one two three")
    async with client_of(rollout) as client:
        stopped = await asked(client, messages=ASK, stop_sequences=["tw", "ree"])
        short = await asked(client, messages=ASK, max_tokens=3)
        whole = await asked(client, messages=ASK, stop_sequences=["four"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "tw")
    assert stopped.content[0].text == "one "
    assert (short.stop_reason, short.content[0].text) == ("max_tokens", "one")
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


async def test_counted_tokens_are_those_of_the_prompt(serve):
    rollout = serve("<think>hm</think>2")
    messages = list(ASK)
    asks = {"model": "policy", "tools": TOOLS, "system": "be brief"}
    async with client_of(rollout) as client:
        for _ in range(2):
            counted = await client.messages.count_tokens(messages=messages, **asks)
            reply = await client.messages.create(messages=messages, max_tokens=50, **asks)
            assert counted.input_tokens == reply.usage.input_tokens
            messages += [{"role": "assistant", "content": reply.content}, *ASK]
    assert len(rollout.policy.turns) == 2


def results_of(reply) -> list[dict[str, Any]]:
    calls = [block for block in reply.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))}
        for call in calls
    ]


async def test_parallel_calls_are_answered_and_sampled_ids_stay(serve):
    rollout = serve(lambda prompt: "3 and 7" if "<|tool|>" in prompt else TWO_CALLS)
    async with client_of(rollout) as client:
        first = await asked(client, messages=ASK, tools=TOOLS)
        said = {"role": "assistant", "content": first.content}
        results = {"role": "user", "content": [*results_of(first)[::-1]]}
        marked = {**results["content"][0], "cache_control": {"type": "ephemeral"}, "is_error": True}
        results["content"][0] = marked
        second = await asked(client, messages=[*ASK, said, results], tools=TOOLS)
    assert second.content[0].text == "3 and 7"
    # The second call is spaced unlike the template writes it, and stays as it was sampled.
    require_trained_once(rollout, 1)


def kept(blocks):
    return blocks


def without_thinking(blocks):
    return [block for block in blocks if block.type != "thinking"]


def with_other_thinking(blocks):
    return [
        block.model_copy(update={"thinking": "ho"}) if block.type == "thinking" else block
        for block in blocks
    ]


@pytest.mark.parametrize(
    ("change", "num_samples"), [(kept, 1), (without_thinking, 3), (with_other_thinking, 3)]
)
async def test_thinking_that_is_gone_or_edited_starts_a_sample(serve, change, num_samples):
    rollout = serve("<think>hm</think>2")
    messages = list(ASK)
    async with client_of(rollout) as client:
        for _ in range(3):
            reply = await asked(client, messages=messages)
            said = {"role": "assistant", "content": change(reply.content)}
            messages += [said, {"role": "user", "content": [{"type": "text", "text": "sure?"}]}]
    require_trained_once(rollout, num_samples)


NUM_TURNS = 20
COMPACTED = 12
SUMMARY = "So far: a few sums. Go on."


def step(number: int) -> str:
    asks = {"name": "add", "arguments": {"a": number, "b": 1}}
    return f"<think>step {number}</think>now<tool_call>\n{json.dumps(asks)}\n</tool_call>"


async def twenty_turns_of_anthropic(rollout, streamed: bool) -> None:
    messages = [{"role": "user", "content": "add"}]
    async with client_of(rollout) as client:
        for number in range(NUM_TURNS):
            if number == COMPACTED:
                messages = [{"role": "user", "content": SUMMARY}]
            reply = await asked(
                client,
                streamed=streamed,
                messages=messages,
                tools=TOOLS,
                system=[{"type": "text", "text": "use tools", "cache_control": {"type": "x"}}],
                thinking={"type": "enabled", "budget_tokens": 1024},
                max_tokens=2048,
            )
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results_of(reply)},
            ]


async def twenty_turns_of_openai(rollout, streamed: bool) -> None:
    system = {"role": "system", "content": "use tools"}
    messages = [system, {"role": "user", "content": "add"}]
    function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
    fields = {"model": "policy", "tools": [{"type": "function", "function": function}]}
    async with openai_client_of(rollout) as client:
        for number in range(NUM_TURNS):
            if number == COMPACTED:
                messages = [system, {"role": "user", "content": SUMMARY}]
            if streamed:
                async with client.chat.completions.stream(messages=messages, **fields) as stream:
                    said = (await stream.get_final_completion()).choices[0].message
            else:
                reply = await client.chat.completions.create(messages=messages, **fields)
                said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in messages[-1]["tool_calls"]:
                call["function"].pop("parsed_arguments", None)
                result = {"role": "tool", "tool_call_id": call["id"], "content": str(number)}
                messages.append(result)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("turns", [twenty_turns_of_anthropic, twenty_turns_of_openai])
async def test_twenty_turns_with_tools_thinking_and_compaction(serve, turns, streamed):
    numbers = iter(range(NUM_TURNS))
    rollout = serve(lambda prompt: step(next(numbers)))
    await turns(rollout, streamed)
    assert len(rollout.policy.turns) == NUM_TURNS
    require_trained_once(rollout, 2)
    assert not rollout.policy.recorder.leaves_out_thinking
    assert len(rollout.policy.recorder.conversations) == 2


async def test_both_clients_go_on_from_one_answer(serve):
    rollout = serve("<think>hm</think>2")
    async with client_of(rollout) as client:
        said = await asked(client, messages=ASK)
    sent = {"role": "assistant", "content": "2", "reasoning_content": said.content[0].thinking}
    async with openai_client_of(rollout) as client:
        await client.chat.completions.create(model="policy", messages=[*ASK, sent, *ASK])
    require_trained_once(rollout, 1)


async def test_the_key_may_come_in_either_header_and_a_wrong_one_is_refused(serve):
    rollout = serve("2")
    async with client_of(rollout, api_key=None, auth_token=rollout.endpoint.api_key) as client:
        await asked(client, messages=ASK)
    async with client_of(rollout, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await asked(client, messages=ASK)
        with pytest.raises(anthropic.AuthenticationError):
            await client.models.list()
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert len(rollout.policy.turns) == 1


async def test_refusals_have_anthropics_form(serve):
    rollout = serve("2", max_model_len=13, sampling=Sampling(max_tokens=4))
    async with client_of(rollout) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await asked(client, messages=ASK, tool_choice={"type": "any"}, tools=TOOLS)
        body = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["message"].startswith("tool_choice: ")
        assert body["error"]["details"] == {"error_code": "unsupported_parameter"}
        with pytest.raises(anthropic.NotFoundError, match="'other'"):
            await asked(client, model="other", messages=ASK)
        with pytest.raises(anthropic.BadRequestError, match="is not JSON"):
            await client.post("/v1/messages", content=b"{", cast_to=object)
        await asked(client, messages=ASK)
        grown = [*ASK, {"role": "assistant", "content": "2"}, of_user({**TEXT, "text": "then?"})]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long.*\b13\b"):
            await asked(client, messages=grown)
    assert len(rollout.policy.turns) == 1
    async with openai_client_of(rollout) as client:
        with pytest.raises(openai.NotFoundError, match="anthropic_base_url"):
            await client.post("/v1/messages", body={}, cast_to=object)


def read(**fields):
    fields = {"model": "policy", "max_tokens": 64, "messages": ASK, **fields}
    return read_anthropic(fields, lambda chat: read_request(chat, OWN, model="policy"))


def answered(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def use(call_id, **more):
    return {"type": "tool_use", "id": call_id, "name": "add", "input": {}, **more}


def result(call_id, content="3"):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def of_user(*blocks):
    return {"role": "user", "content": list(blocks)}


TEXT = {"type": "text", "text": "a"}
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
CUT = {"edits": [{"type": "clear_tool_uses_20250919"}]}
REFUSED = [
    ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice", "use 'auto'"),
    ({"tool_choice": "auto"}, "tool_choice", "an object of type auto"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}, "tools": TOOLS},
        "tool_choice.disable_parallel_tool_use",
        "true or false",
    ),
    ({"top_p": 0.9}, "top_p", "leave it out"),
    ({"temperature": 0}, "temperature", "leave it out"),
    ({"stop_sequences": [""]}, "stop_sequences", "none of them empty"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format",
        "in the prompt",
    ),
    (
        {"output_config": {"format": {"type": "grammar", "schema": {}}}},
        "output_config.format",
        "must be json_schema, got 'grammar'",
    ),
    ({"output_config": {"size": 3}}, "output_config.size", "leave it out"),
    ({"context_management": CUT}, "context_management.edits.0", "send it as"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "offer tools"),
    ({"temprature": 0.3}, "temprature", "did you mean temperature"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type", "let the program"),
    ({"tools": [{"name": "w"}]}, "tools.0", "input_schema"),
    ({"tools": [{**TOOLS[0], "input_examples": [{"a": 1}]}]}, "tools.0.input_examples", "leave it"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "user or assistant"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "list of blocks"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name", "leave"),
    ({"messages": [of_user({"type": "document"})]}, "messages.0.content.0", "text, image"),
    ({"messages": [of_user({**TEXT, "voice": "b"})]}, "messages.0.content.0.voice", "leave it out"),
    ({"messages": [*ASK, of_user(PICTURE)]}, "messages.0.content[1]", "text alone"),
    (
        {"messages": [*ASK, answered({"type": "redacted_thinking", "data": "x"}), *ASK]},
        "messages.1.content.0",
        "thinking, text, tool_use",
    ),
    ({"messages": [*ASK, {"role": "system", "content": "x"}]}, "messages.1", "of the user"),
    ({"messages": [*ASK, answered(TEXT)]}, "messages.1", "end with a message of the user"),
    (
        {"messages": [*ASK, answered({"type": "thinking"}), *ASK]},
        "messages.1.content.0.thinking",
        "",
    ),
    ({"messages": [*ASK, answered(use("a", input="x")), *ASK]}, "messages.1.content.0", "a call"),
    (
        {"messages": [*ASK, answered(use("a")), of_user(TEXT, result("a"))]},
        "messages",
        "results are missing before messages.2 (user)",
    ),
    (
        {"messages": [*ASK, answered(use("a")), of_user(result("b"))]},
        "messages.2.content.0.tool_use_id",
        "are 'a'",
    ),
    (
        {"messages": [*ASK, answered(use("a"), TEXT), of_user(result("a"))]},
        "messages",
        "results are missing before messages.1 (assistant)",
    ),
]


@pytest.mark.parametrize(("fields", "param", "advice"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_by_name_with_what_to_do(fields, param, advice):
    with pytest.raises(Refusal) as caught:
        read(**fields)
    assert caught.value.param == param
    assert advice in caught.value.message


NEUTRAL = [
    {"metadata": {"user_id": "me"}, "service_tier": "auto"},
    {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"tool_choice": {"type": "auto"}, "tools": [], "stop_sequences": [], "system": ""},
    {"cache_control": {"type": "ephemeral"}, "mcp_servers": [], "container": None},
    {"messages": [of_user({"type": "text", "text": "1+1=", "cache_control": {"type": "x"}})]},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_changes_nothing_is_taken(fields):
    assert read(**fields) == read()


def test_messages_are_read_as_the_template_sees_them():
    sent = [
        of_user(TEXT, {"type": "text", "text": "b"}),
        {"role": "user", "content": "c"},
        answered({"type": "thinking", "thinking": "hm", "signature": "s"}),
        answered(TEXT, use("1", input={"a": 1})),
        of_user(result("1", [TEXT, TEXT]), TEXT),
        answered(TEXT),
        answered({"type": "thinking", "thinking": "ho"}),
        of_user(TEXT),
    ]
    call = ToolCall(id="1", name="add", arguments='{"a":1}')
    assert read(messages=sent, system="be brief").messages == (
        Message(role="system", content="be brief"),
        Message(role="user", content="a\nb\nc"),
        Message(role="assistant", content="a", reasoning="hm", tool_calls=(call,)),
        Message(role="tool", content="a\na", tool_call_id="1"),
        Message(role="user", content="a"),
        Message(role="assistant", content="a"),
        Message(role="assistant", content="", reasoning="ho"),
        Message(role="user", content="a"),
    )


_TEXTS = st.text(max_size=8)
_CALLS = st.builds(
    ToolCall,
    id=st.text(alphabet="abc", min_size=1, max_size=3),
    name=st.just("add"),
    arguments=st.one_of(
        _TEXTS,
        st.sampled_from(["", "[1]", "NaN", '{"a": NaN}', '{"a": 1', '{"INVALID_JSON": "x"}']),
        st.dictionaries(_TEXTS, st.integers() | st.floats(allow_nan=False) | _TEXTS).map(
            json.dumps
        ),
    ),
)


@pytest.mark.slow
@given(text=_TEXTS, thinking=_TEXTS, calls=st.lists(_CALLS, max_size=3))
def test_an_answer_that_is_sent_back_is_the_same_message(text, thinking, calls):
    """Also with arguments that are no JSON, which a program cannot be given as an object."""
    said = Message(role="assistant", content=text, reasoning=thinking, tool_calls=tuple(calls))
    completion = Completion(message=said, finish_reason="stop")
    blocks = json.loads(msgspec.json.encode(message_json(completion, model="policy")))["content"]
    results = [result(call.id) for call in calls]
    read_back = read(messages=[*ASK, answered(*blocks), of_user(*results, TEXT)]).messages[1]
    assert same_message(said, read_back)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "edits", "name"]), inner)
    ),
    max_leaves=4,
)
_PARTS = [
    lambda one: {"messages": one},
    lambda one: {"messages": [*ASK, answered(use("a")), of_user(one, result("a", one))]},
    lambda one: {
        "messages": [{"role": "assistant", "content": one}, of_user({**TEXT, "text": one})]
    },
    lambda one: {"messages": [answered(use(one, input=one)), of_user({**PICTURE, "source": one})]},
    *(
        lambda one, name=name: {name: one}
        for name in (
            "system",
            "tools",
            "tool_choice",
            "context_management",
            "output_config",
            "stop",
        )
    ),
]


@given(make=st.sampled_from(_PARTS), one=_JSON)
def test_any_json_is_read_or_refused(make, one):
    with contextlib.suppress(Refusal):
        read(**make(one))
