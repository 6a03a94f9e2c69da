"""The Responses API of the `openai` client as it comes: read as chat, recorded as exactly."""

import contextlib
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_anthropic_client import (
    COMPACTED,
    NUM_TURNS,
    SCHEMA,
    SUMMARY,
    require_trained_once,
    step,
)
from test_anthropic_client import asked as anthropic_asked
from test_anthropic_client import client_of as anthropic_client_of
from test_openai_client import TWO_CALLS, client_of

from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import read_request
from telescope_core.gateway.responses_reply import response_json
from telescope_core.gateway.responses_request import MAX_KEPT, read_responses
from telescope_core.types import Completion, Message, Sampling, ToolCall
from telescope_train.chat.formats import same_message

TOOLS = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA}]
OWN = Sampling(max_tokens=64, temperature=0.9)


async def asked(client, *, streamed: bool = False, **fields):
    fields = {"model": "policy", **fields}
    if not streamed:
        return await client.responses.create(**fields)
    async with client.responses.stream(**fields) as stream:
        return await stream.get_final_response()


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_with_usage_and_its_record(serve, streamed):
    rollout = serve(f"<think>hm</think>so{TWO_CALLS}")
    async with client_of(rollout) as client:
        reply = await asked(client, streamed=streamed, input="1+1=", tools=TOOLS)
        short = await asked(client, input="1+1=", max_output_tokens=4)
    thinking, said, *calls = reply.output
    assert (thinking.content[0].text, reply.output_text) == ("hm", "so")
    assert said.role == "assistant"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ]
    assert reply.status == "completed"
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    first, _ = (turn.completion for turn in rollout.policy.turns)
    assert reply.usage.input_tokens == len(first.prompt_ids)
    assert reply.usage.output_tokens == len(first.completion_ids)


def as_they_came(items):
    return [item.model_dump(exclude_none=True) for item in items]


def packed(items):
    """Return what a program sends that keeps no state at the endpoint."""
    sent = [item.model_dump(exclude_none=True, exclude={"id", "status"}) for item in items]
    for item in sent:
        if item["type"] == "reasoning":
            item.pop("content")
        item.pop("parsed_arguments", None)
    return sent


def without_thinking(items):
    return [one for one in packed(items) if one["type"] != "reasoning"]


@pytest.mark.parametrize(
    ("change", "num_samples"), [(as_they_came, 1), (packed, 1), (without_thinking, 3)]
)
async def test_thinking_that_is_gone_starts_a_sample(serve, change, num_samples):
    rollout = serve("<think>hm</think>2")
    history = [{"role": "user", "content": "1+1="}]
    async with client_of(rollout) as client:
        for _ in range(3):
            reply = await asked(client, input=history)
            history += [*change(reply.output), {"role": "user", "content": "sure?"}]
    require_trained_once(rollout, num_samples)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
async def test_twenty_turns_with_tools_thinking_and_compaction(serve, streamed):
    numbers = iter(range(NUM_TURNS))
    rollout = serve(lambda prompt: step(next(numbers)))
    history = [{"role": "user", "content": "add"}]
    async with client_of(rollout) as client:
        for number in range(NUM_TURNS):
            if number == COMPACTED:
                history = [{"role": "user", "content": [{"type": "input_text", "text": SUMMARY}]}]
            reply = await asked(
                client,
                streamed=streamed,
                input=history,
                instructions="use tools",
                tools=TOOLS,
                store=False,
                include=["reasoning.encrypted_content"],
                reasoning={"effort": "low"},
            )
            history += packed(reply.output)
            history += [
                {"type": "function_call_output", "call_id": one.call_id, "output": str(number)}
                for one in reply.output
                if one.type == "function_call"
            ]
    assert len(rollout.policy.turns) == NUM_TURNS
    require_trained_once(rollout, 2)
    assert not rollout.policy.recorder.leaves_out_thinking


ODD = ["", "long enough to be cut", "<think>hm</think>", "<think>hm", "  c \n", "<tool_call>\n{"]


@pytest.mark.parametrize("by_messages", [False, True])
async def test_odd_answers_are_gone_on_from_as_they_were_sampled(serve, by_messages):
    """Empty ones, cut ones, thinking alone, and calls that are none."""
    answers = iter(ODD)
    rollout = serve(lambda prompt: next(answers), sampling=Sampling(max_tokens=20))
    history: list = []
    connect = anthropic_client_of if by_messages else client_of
    async with connect(rollout) as client:
        for number in range(len(ODD)):
            history.append({"role": "user", "content": f"turn {number}"})
            if by_messages:
                said = await anthropic_asked(client, messages=history)
                history.append({"role": "assistant", "content": said.content})
            else:
                history += packed((await asked(client, input=history)).output)
    # As with chat completions: the template closes the thinking that the model left open.
    require_trained_once(rollout, 2)


async def test_the_client_gets_the_refusal_and_nothing_is_asked(serve):
    rollout = serve("2")
    async with client_of(rollout) as client:
        with pytest.raises(openai.BadRequestError, match="send the whole history") as refused:
            await asked(client, input="hi", conversation="conv_1")
    assert (refused.value.param, rollout.policy.turns) == ("conversation", [])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("repeats_calls", [False, True])
async def test_a_program_may_name_the_answer_before(serve, streamed, repeats_calls):
    """Thinking is kept with it, so the turns are one sample; instructions are those of each."""
    calls = f"<think>hm</think>so{TWO_CALLS}"
    rollout = serve(lambda prompt: "<think>ha</think>done" if "sum" in prompt else calls)
    own = {"tools": TOOLS, "instructions": "You add.", "streamed": streamed}
    async with client_of(rollout) as client:
        first = await asked(client, input="1+1=", **own)
        made = [one for one in packed(first.output) if one["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": one["call_id"], "output": "sum"}
            for one in made
        ]
        more = [*made, *results] if repeats_calls else results
        second = await asked(client, input=more, previous_response_id=first.id, **own)
        third = await asked(client, input="sure?", previous_response_id=second.id, **own)
        (conversation,) = rollout.policy.recorder.conversations
        assert [one.role for one in conversation] == [
            *("system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant")
        ]
        require_trained_once(rollout, 1)
        branch = {"input": "really?", "previous_response_id": second.id, "streamed": streamed}
        fourth = await asked(client, tools=TOOLS, **branch)
    assert [one.output_text for one in (second, third, fourth)] == ["done"] * 3
    said = rollout.policy.recorder.conversations[1]
    assert [said[0].role, said[-2].content] == ["user", "really?"]


async def test_answers_are_named_while_they_are_kept(serve):
    rollout = serve("2")
    async with client_of(rollout) as client:
        unkept = await asked(client, input="hi", store=False)
        kept = [await asked(client, input="hi") for _ in range(MAX_KEPT + 1)]
        for gone in (unkept.id, kept[0].id, "resp_1"):
            with pytest.raises(openai.BadRequestError, match="the last 16 of a rollout") as refused:
                await asked(client, input="hi", previous_response_id=gone)
            assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError, match="input must be text, or a list"):
            await asked(client, input=3, previous_response_id=kept[1].id)
        assert (await asked(client, input="?", previous_response_id=kept[1].id)).output_text == "2"


def read(**fields):
    fields = {"model": "policy", "input": "hi", **fields}
    return read_responses(fields, lambda chat: read_request(chat, OWN, model="policy"))


ASK = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
NAMED = {"type": "function", "name": "add"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
REFUSED = [
    ({"conversation": "c"}, "conversation", "as input"),
    ({"background": True}, "background", "leave it out"),
    ({"truncation": "auto"}, "truncation", "leave it out"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "in the prompt"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "leave it out"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "as a function"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice", "use 'auto'"),
    ({"tool_choice": {**ALLOWED, "tools": [NAMED]}, "tools": TOOLS}, "tool_choice", "use 'auto'"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "'mcp' is not run here"),
    ({"tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0]", "function"),
    ({"tool_choice": {**ALLOWED, "tools": ["add"]}}, "tool_choice.tools[0]", "'name': ..."),
    ({"tool_choice": ALLOWED}, "tool_choice", "a list of tools"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "'name': ..."),
    ({"temprature": 0.3}, "temprature", "did you mean temperature"),
    ({"instructions": ["x"]}, "instructions", "text"),
    ({"input": []}, "input", "at least one"),
    ({"input": [3]}, "input[0]", "an item"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "function_call_output"),
    ({"input": [{**ASK, "name": "Al"}]}, "input[0].name", "leave it out"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "one of system"),
    ({"input": [{**ASK, "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "_image"),
    ({"input": [ASK, {"role": "assistant", "content": "x"}]}, "input[1]", "message of the user"),
    ({"input": [CALL, ASK]}, "messages", "results are missing before input[1] (user)"),
    ({"input": [{**CALL, "name": None}, ASK]}, "input[0].tool_calls[0]", "arguments as JSON"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}, ASK]}, "input[0]", "came"),
    ({"include": ["message.output_text.logprobs"]}, "include", "recorded for training"),
]


@pytest.mark.parametrize(("fields", "param", "advice"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_by_name_with_what_to_do(fields, param, advice):
    with pytest.raises(Refusal) as caught:
        read(**fields)
    assert caught.value.param == param
    assert advice in caught.value.message


NEUTRAL = [
    {"store": True, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high"}},
    {
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "tools": [],
        "background": False,
    },
    {"input": [{"type": "message", **ASK}], "metadata": {"a": "b"}, "parallel_tool_calls": True},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
]


def test_instructions_and_first_items_of_a_developer_are_one_system_message():
    said = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}, ASK]
    assert read(instructions="a", input=[*said, *said]).messages == (
        Message(role="system", content="a\nb\nc"),
        Message(role="user", content="hi"),
        Message(role="system", content="b\nc"),
        Message(role="user", content="hi"),
    )


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_changes_nothing_is_taken(fields):
    assert read(**fields) == read()


_TEXTS = st.text(max_size=8)
_CALLS = st.builds(
    ToolCall,
    id=st.text(alphabet="abc", min_size=1, max_size=3),
    name=st.just("add"),
    arguments=st.one_of(_TEXTS, st.sampled_from(["", "[1]", '{"a": 1'])),
)


@given(text=_TEXTS, thinking=_TEXTS, calls=st.lists(_CALLS, max_size=3))
def test_an_answer_that_is_sent_back_is_the_same_message(text, thinking, calls):
    said = Message(role="assistant", content=text, reasoning=thinking, tool_calls=tuple(calls))
    items = response_json(Completion(message=said, finish_reason="stop"), model="policy")["output"]
    results = [
        {"type": "function_call_output", "call_id": call.id, "output": "3"} for call in calls
    ]
    for sent in (items, [{**one, "content": []} if "summary" in one else one for one in items]):
        read_back = read(input=[ASK, *json.loads(json.dumps(sent)), *results, ASK]).messages[1]
        assert same_message(said, read_back)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "text", "content", "format", "name"]), inner)
    ),
    max_leaves=4,
)
_NAMES = ("input", "instructions", "tools", "tool_choice", "text", "truncation", "reasoning")
_ITEMS = [
    lambda one: {**CALL, "call_id": one, "arguments": one},
    lambda one: {"type": "reasoning", "content": one, "encrypted_content": one},
    lambda one: {"type": "function_call_output", "call_id": "a", "output": one},
    lambda one: {"type": one, "role": one, "content": one},
]


@given(name=st.sampled_from(_NAMES), item=st.sampled_from(_ITEMS), one=_JSON)
def test_any_json_is_read_or_refused(name, item, one):
    for fields in ({name: one}, {"input": [item(one), ASK]}):
        with contextlib.suppress(Refusal):
            read(**fields)
