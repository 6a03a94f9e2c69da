"""The `openai` client as it comes: what it sends is read, what it gets is what it expects."""

import asyncio
import json

import openai
import pytest

from telescope_train.batches.samples import samples_from_rollout

ASK = [{"role": "user", "content": "1+1="}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
TWO_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    '<tool_call>\n{"name":"add","arguments":{"b":4,"a":3}}\n</tool_call>'
)


def client_of(rollout, **options) -> openai.AsyncOpenAI:
    endpoint = rollout.endpoint
    options = {"max_retries": 0, **options}
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


def as_rollout(policy):
    from telescope_core.types import Rollout

    return Rollout(
        environment="toy", example_id="e", group_id="g", index=0, turns=tuple(policy.turns)
    )


async def test_an_answer_with_usage_and_its_record(serve):
    rollout = serve("it is 2")
    async with client_of(rollout) as client:
        reply = await client.chat.completions.create(model="policy", messages=ASK)
        models = [model.id async for model in client.models.list()]
        assert (await client.models.retrieve("policy")).id == "policy"
    assert models == ["policy"]
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "it is 2")
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    (turn,) = rollout.policy.turns
    assert tuple(turn.completion.prompt_ids) == rollout.pool.prompts[0]
    assert reply.usage.prompt_tokens == len(turn.completion.prompt_ids)
    assert reply.usage.completion_tokens == len(turn.completion.completion_ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert (turn.completion.oldest_version, turn.completion.newest_version) == (3, 4)
    assert 0 < turn.started_s <= turn.ended_s
    assert turn.temperature == 0.9


async def test_what_a_request_leaves_out_is_sampled_as_the_rollout(serve):
    rollout = serve("one two three")
    async with client_of(rollout) as client:
        ask = client.chat.completions.create
        await ask(model="policy", messages=ASK)
        await ask(model="policy", messages=ASK, max_tokens=5000, temperature=0.5, stop="tw")
        short = await ask(model="policy", messages=ASK, max_completion_tokens=3)
    assert rollout.pool.priorities == [0, -1, -2], "later turns go first"
    first, second, third = rollout.pool.sampling
    assert first.max_tokens == 400
    assert (second.max_tokens, second.temperature, second.stop) == (400, 0.5, ("tw",))
    assert third.max_tokens == 3
    assert (short.choices[0].finish_reason, short.choices[0].message.content) == ("length", "one")
    assert [turn.temperature for turn in rollout.policy.turns] == [0.9, 0.5, 0.9]
    assert rollout.policy.turns[1].completion.message.content == "one "


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_synchronous_client_in_a_thread(serve, is_streamed):
    rollout = serve("it is 2")

    def ask() -> str:
        endpoint = rollout.endpoint
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            if not is_streamed:
                reply = client.chat.completions.create(model=endpoint.model, messages=ASK)
                return reply.choices[0].message.content
            stream = client.chat.completions.create(model=endpoint.model, messages=ASK, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == "it is 2"
    assert len(rollout.policy.turns) == 1


async def test_a_stream_has_the_parts_in_order_and_the_usage_last(serve):
    rollout = serve(f"<think>hm</think>so{TWO_CALLS}")
    async with client_of(rollout) as client:
        stream = await client.chat.completions.create(
            model="policy",
            messages=ASK,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    *parts, last = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in parts)
    assert (last.choices, last.usage.total_tokens > 0) == ([], True)
    assert parts[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in parts[-2:]] == [None, "tool_calls"]
    assert [chunk.choices[0].delta.reasoning_content for chunk in parts[1:2]] == ["hm"]


@pytest.mark.parametrize("num_calls", [1, 2])
async def test_a_program_that_takes_one_call_gets_the_first(serve, num_calls):
    """What was sampled behind it is trained on; the next turn cannot go on from it."""
    calls = "".join(TWO_CALLS.partition("</tool_call>")[: 2 if num_calls == 1 else 3])
    rollout = serve(lambda prompt: "done" if "sum" in prompt else calls)
    one_call = {"model": "policy", "tools": TOOLS, "parallel_tool_calls": False}
    async with client_of(rollout) as client:
        ask = client.chat.completions.create
        said = (await ask(messages=ASK, **one_call)).choices[0].message
        (call,) = said.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        result = {"role": "tool", "tool_call_id": call.id, "content": "sum"}
        await ask(messages=[*ASK, said, result], **one_call)
        listed = [{"type": "function", **TOOLS[0]["function"]}]
        asked = {"input": ASK[0]["content"], "tools": listed, "parallel_tool_calls": False}
        answer = await client.responses.create(model="policy", **asked)
        assert [item.type for item in answer.output] == ["function_call"]
    first = rollout.policy.turns[0].completion
    assert len(first.message.tool_calls) == num_calls
    samples = samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)
    assert len(samples) == num_calls + 1
    sampled = sum(len(turn.completion.completion_ids) for turn in rollout.policy.turns)
    assert sum(int(sample.mask.sum()) for sample in samples) == sampled


async def test_the_clients_own_stream_reader_puts_calls_together(serve):
    rollout = serve(f"so{TWO_CALLS}")
    async with (
        client_of(rollout) as client,
        client.chat.completions.stream(model="policy", messages=ASK, tools=TOOLS) as stream,
    ):
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content == "so"
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]
    assert calls == [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]


async def test_parallel_calls_are_answered_and_sampled_ids_stay(serve):
    rollout = serve(lambda prompt: "3 and 7" if "<|tool|>" in prompt else TWO_CALLS)
    messages = list(ASK)
    async with client_of(rollout) as client:
        first = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        said = first.choices[0].message
        assert (first.choices[0].finish_reason, said.content) == ("tool_calls", None)
        assert len({call.id for call in said.tool_calls}) == 2
        messages.append(said)
        for call in said.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = str(sum(arguments.values()))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
    assert second.choices[0].message.content == "3 and 7"
    one, two = (turn.completion for turn in rollout.policy.turns)
    known = (*one.prompt_ids, *one.completion_ids)
    assert tuple(two.prompt_ids[: len(known)]) == known
    # The second call is spaced unlike the template writes it, and stays as it was sampled.
    (sample,) = samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)
    assert sample.mask.sum() == len(one.completion_ids) + len(two.completion_ids)


async def thinking_agent(client, *, sends_thinking_back: bool) -> None:
    messages = list(ASK)
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        said = reply.choices[0].message
        assert (said.reasoning_content, said.content) == ("hm", "2")
        kept = {"reasoning_content": said.reasoning_content} if sends_thinking_back else {}
        messages += [
            {"role": "assistant", "content": said.content, **kept},
            {"role": "user", "content": "sure?"},
        ]


@pytest.mark.parametrize(
    ("keep_thinking", "sends_thinking_back", "num_samples"),
    [(True, True, 1), (True, False, 2), (False, True, 2), (False, False, 2)],
)
async def test_thinking_that_is_gone_starts_a_sample(
    serve, keep_thinking, sends_thinking_back, num_samples
):
    rollout = serve("<think>hm</think>2", keep_thinking=keep_thinking)
    async with client_of(rollout) as client:
        await thinking_agent(client, sends_thinking_back=sends_thinking_back)
    samples = samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)
    assert len(samples) == num_samples
    trained = sum(int(sample.mask.sum()) for sample in samples)
    assert trained == sum(len(t.completion.completion_ids) for t in rollout.policy.turns)
    for number, prompt in enumerate(rollout.pool.prompts):
        assert tuple(rollout.policy.turns[number].completion.prompt_ids) == prompt


async def test_prompts_are_tokenized_anew_where_the_run_says_so(serve):
    # `1` in place of a token the tokenizer would write decodes to nothing and is lost.
    rollout = serve("2\u00e9", interleaved=False)
    async with client_of(rollout) as client:
        await thinking_free_turns(client)
    first, second = (turn.completion for turn in rollout.policy.turns)
    known = (*first.prompt_ids, *first.completion_ids)
    assert tuple(second.prompt_ids[: len(known)]) != known


async def thinking_free_turns(client) -> None:
    messages = list(ASK)
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        content = reply.choices[0].message.content
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": "sure?"},
        ]


async def test_compaction_and_sub_agents_are_samples_of_their_own(serve):
    rollout = serve("ok")
    async with client_of(rollout) as client:
        await thinking_free_turns(client)
        summary = [{"role": "user", "content": "so far: ok, ok. go on"}]
        helper = [{"role": "system", "content": "you help"}, {"role": "user", "content": "do"}]
        await asyncio.gather(
            *(
                client.chat.completions.create(model="policy", messages=messages)
                for messages in (summary, helper, helper)
            )
        )
    samples = samples_from_rollout(as_rollout(rollout.policy), 1.0, 1.0)
    assert len(rollout.policy.turns) == 5
    assert len(samples) == 4
    assert sum(int(sample.mask.sum()) for sample in samples) == 5 * 3


@pytest.mark.slow
async def test_many_rollouts_at_once_keep_apart(serve):
    rollouts = [serve(f"I am {number}") for number in range(16)]

    async def ask(rollout) -> str:
        async with client_of(rollout) as client:
            reply = await client.chat.completions.create(model="policy", messages=ASK)
        return reply.choices[0].message.content

    replies = await asyncio.gather(*map(ask, rollouts))
    assert replies == [f"I am {number}" for number in range(16)]
    assert [len(rollout.policy.turns) for rollout in rollouts] == [1] * 16
