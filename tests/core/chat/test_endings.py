"""How an answer ended: cut, filtered and refused ones count as what they are, to the record."""

import json

import pytest
from loopback_endpoint import ASK, ask, reply, serving

from telescope_core import SingleTurnEnvironment, reward
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.evals.result import count_lines
from telescope_core.examples import GeneratedSource
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records.rows import row_from_json, row_to_json
from telescope_core.reports.rollouts_html import Pictures, sample
from telescope_core.types import Example, Message, Sampling

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":'}}


class Greet(SingleTurnEnvironment):
    """Says hello."""

    def examples(self, split):
        return GeneratedSource(lambda random, index: Example(id=str(index), prompt="hi"), seed="x")

    @reward
    def polite(self, rollout, example):
        return 1.0 if "hello" in rollout.completion_text else 0.0


async def evaluated(client, **settings):
    rows = []
    result = await run_eval(
        InProcessEnvironment(Greet(), name="greet"),
        client,
        EvalSettings(
            **{"num_examples": 1, "rollouts": 1, "sampling": Sampling(max_tokens=4), **settings}
        ),
        on_rollout=rows.append,
    )
    return result, [row_from_json(json.loads(json.dumps(row_to_json(row)))) for row in rows]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("tool_calls", "tool_calls"),
        ("stop", "tool_calls"),
        (None, "tool_calls"),
    ],
)
async def test_a_turn_with_calls_keeps_the_reason_that_ended_it(said, expected):
    async with serving(reply(None, said, tool_calls=[CALL])) as (_, client):
        completion = await ask(client)
    assert completion.finish_reason == expected
    assert completion.message.tool_calls[0].arguments == '{"a":'


async def test_a_cut_call_counts_as_truncated():
    async with serving(reply(None, "length", tool_calls=[CALL])) as (_, client):
        result, (row,) = await evaluated(client)
    assert (result.num_truncated, row.is_truncated, row.stop_reason) == (1, True, "length")
    assert row.finish_reasons == ("length",)


async def test_a_filtered_answer_is_no_ordinary_empty_answer():
    async with serving(reply("", "content_filter")) as (_, client):
        result, (row,) = await evaluated(client)
    assert (result.num_filtered, result.num_refused, result.num_truncated) == (1, 0, 0)
    assert row.finish_reasons == ("content_filter",)
    assert "stopped by a content filter" in sample(row, Pictures())


@pytest.mark.parametrize(
    "error",
    [
        {"message": "no", "type": "invalid_request_error", "code": "content_policy_violation"},
        {"message": "long " * 99, "innererror": {"filtered": True}, "code": "content_filter"},
    ],
)
async def test_an_answer_that_a_filter_refuses_with_a_status_counts_as_filtered(error):
    async with serving((400, json.dumps({"error": error}))) as (endpoint, client):
        result, (row,) = await evaluated(client)
        assert len(endpoint.requests) == 1, "it is not asked again"
    assert (result.num_filtered, result.num_failed, result.num_scored) == (1, 0, 1)
    assert (row.finish_reasons, row.reward) == (("content_filter",), 0.0)


async def test_another_refusal_of_a_request_blames_no_filter():
    error = {"message": "content_filter is no setting", "code": "unknown_parameter"}
    async with serving((400, json.dumps({"error": error}))) as (_, client):
        result, (row,) = await evaluated(client)
    assert (result.num_filtered, result.num_failed) == (0, 1)
    assert "the endpoint refuses this request" in row.error


async def test_a_refusal_is_kept_shown_and_counted():
    async with serving(reply(None, refusal="I can't help with that.")) as (endpoint, client):
        result, (row,) = await evaluated(client)
        completion = await ask(client)
        await ask(client, (*ASK, completion.message))
        sent = endpoint.requests[-1]["messages"][1]
    assert (result.num_refused, result.num_filtered) == (1, 0)
    said = Message(role="assistant", content="", refusal="I can't help with that.")
    assert row.messages[-1] == completion.message == said
    assert sent["refusal"] == "I can't help with that."
    assert "I can&#x27;t help with that." in sample(row, Pictures())


async def test_prompt_tokens_and_repeated_requests_are_summed():
    async with serving(503, reply("hello")) as (_, client):
        result, (row,) = await evaluated(client)
    assert (row.num_prompt_tokens, row.num_http_retries) == (5, 1)
    assert (result.mean_prompt_tokens, result.num_http_retries) == (5.0, 1)


@pytest.mark.parametrize("counts", [(5.0, 2.0), ("5", "2")])
async def test_counts_of_another_type_are_read(counts):
    usage = dict(zip(("prompt_tokens", "completion_tokens"), counts, strict=True))
    async with serving(reply("hello") | {"usage": usage}) as (_, client):
        _, (row,) = await evaluated(client)
    assert (row.num_prompt_tokens, row.num_completion_tokens) == (5, 2)


@pytest.mark.parametrize(
    "usage",
    [
        *(None, {}, {"prompt_tokens": 5}, [], "5", 5),
        *(
            {"prompt_tokens": 5, "completion_tokens": odd}
            for odd in (-1, 2.5, "two", "-2", True, None, [2], 10**19, 1e300, "9" * 5000)
        ),
    ],
)
async def test_tokens_that_an_endpoint_does_not_count_are_unknown(usage):
    async with serving(reply("hello") | {"usage": usage}, reply("hello")) as (_, client):
        result, rows = await evaluated(client, rollouts=2, concurrency=1)
    assert [(row.num_prompt_tokens, row.num_completion_tokens) for row in rows] == [
        (None, None),
        (5, 2),
    ]
    assert (result.mean_prompt_tokens, result.mean_completion_tokens) == (5.0, 2.0)
    assert "1 turn, - tokens" in sample(rows[0], Pictures())
    async with serving(reply("hello") | {"usage": usage}) as (_, client):
        result, _ = await evaluated(client)
    assert (result.mean_prompt_tokens, result.mean_completion_tokens) == (None, None)
    assert "; - tokens each; " in count_lines(result)[0]
