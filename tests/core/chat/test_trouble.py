"""Trouble of an endpoint is shown while it lasts, and refusals of every request end at once."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from loopback_endpoint import ask, reply, serving
from test_endings import Greet, evaluated
from tests.core.one_rollout import let_time_pass

from telescope_core.chat import http, trouble
from telescope_core.chat.client import MOST_DENIED, ApiKey
from telescope_core.chat.http import RequestLimits
from telescope_core.chat.trouble import SHOWN_EVERY_S, Troubles, showing_troubles, watching
from telescope_core.errors import EndpointAccessError, EndpointError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.types import Message, Sampling, Split, StopReason


def test_a_line_is_shown_at_once_and_then_now_and_again():
    now_s = [100.0]
    troubles = Troubles(lambda: now_s[0])
    lines = []
    with showing_troubles(lines.append):
        for _ in range(12):
            troubles.failed("http://a/v1", "http://a/v1 answered 429: slow down", wait_s=4.0)
        now_s[0] += SHOWN_EVERY_S
        troubles.failed("http://a/v1", "http://a/v1 answered 429: slow down", wait_s=2.5)
    assert len(lines) == 2
    assert all(line.startswith("http://a/v1 answered 429") for line in lines)
    assert [line.endswith("4.0 s)") for line in lines] == [True, False]
    assert "13 times" in lines[1]
    assert logging.getLogger("telescope_core.chat.trouble").propagate


def test_trouble_is_watched_until_it_is_over():
    troubles = Troubles()
    with watching() as outer, watching() as inner:
        troubles.failed("http://a", "busy", wait_s=1.0)
        troubles.failed("http://b", "down", wait_s=1.0)
        assert inner.text == outer.text
        assert [said in inner.text for said in ("busy", "down")] == [True, True]
        troubles.over("http://a")
    assert [said in outer.text for said in ("busy", "down")] == [False, True]


async def test_attempts_that_are_repeated_are_shown_and_counted():
    lines = []
    async with serving(503, 503, reply()) as (_, client):
        with showing_troubles(lines.append):
            completion = await ask(client)
    assert completion.num_retries == 2
    assert len(lines) == 1
    assert "/v1/chat/completions answered 503" in lines[0]


async def test_the_cause_is_part_of_the_message_of_a_deadline():
    def busy(body):
        if len(endpoint.requests) == 2:
            let_time_pass()
        return 503, "busy"

    async with serving(busy) as (endpoint, client):
        request = PlayRequest(
            split=Split.EVAL,
            example_index=0,
            group_id="g",
            index=0,
            sampling=Sampling(max_tokens=4),
            deadline_s=60.0,
        )
        rollout = await InProcessEnvironment(Greet(), name="greet").play(
            request, client.policy("r")
        )
    assert rollout.stop_reason is StopReason.TIMEOUT
    assert "60 s" in rollout.error
    assert "answered 503: busy" in rollout.error
    assert len(endpoint.requests) >= 2


@pytest.mark.parametrize(
    ("status", "options", "fact"),
    [
        (401, {}, "--api-key-env"),
        (401, {"api_key": ApiKey("", "MY_KEY")}, "MY_KEY is not set"),
        (401, {"api_key": ApiKey("k", "MY_KEY")}, "MY_KEY was not accepted"),
        (403, {"api_key": "k", "model": "tiny"}, "'tiny'"),
        (404, {"model": "tony"}, r"'tony'.*'tiny'"),
        (404, {"model": "tiny"}, "base URL"),
    ],
)
async def test_a_refusal_of_every_request_ends_the_eval_at_once(status, options, fact):
    async with serving(status, **options) as (endpoint, client):
        with pytest.raises(EndpointAccessError, match=f"{status}.*{fact}"):
            await evaluated(client, num_examples=40)
    # Those in flight at the same time have been sent already; none is repeated.
    assert len(endpoint.requests) <= 40


async def test_none_is_sent_after_the_first_refusal():
    async with serving(401) as (endpoint, client):
        with pytest.raises(EndpointAccessError):
            await evaluated(client, num_examples=40, concurrency=1)
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [403, 404])
async def test_an_endpoint_that_has_answered_may_refuse_one_request(status):
    async with serving(reply("hello"), status, reply("hello")) as (endpoint, client):
        result, _ = await evaluated(client, num_examples=3, concurrency=1)
    assert (result.num_scored, len(endpoint.requests)) == (3, 4)


AT_ONCE = RequestLimits(retry_budget_s=0.0)


@pytest.mark.parametrize(
    ("key", "fact"),
    [
        (None, "with no API key before"),
        (ApiKey("k", "MY_KEY"), "the same API key in MY_KEY before"),
    ],
)
async def test_a_key_that_is_revoked_ends_the_eval(key, fact):
    async with serving(reply("hello"), 401, api_key=key, limits=AT_ONCE) as (endpoint, client):
        with pytest.raises(EndpointAccessError, match=rf"answered 401: .*{fact}"):
            await evaluated(client, num_examples=9, concurrency=1)
    assert len(endpoint.requests) == 1 + MOST_DENIED


async def test_a_single_401_of_an_endpoint_that_has_answered_passes(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.005)
    async with serving(reply("hello"), 401, reply("hello")) as (endpoint, client):
        result, rows = await evaluated(client, num_examples=3, concurrency=1)
    assert (result.num_scored, result.num_failed, len(endpoint.requests)) == (3, 0, 4)
    assert sum(row.num_http_retries for row in rows) == 1
    assert not any("attempts" in row.tags for row in rows)


async def test_an_answer_in_between_shows_that_the_key_is_good():
    denied = [401] * (MOST_DENIED - 1)
    script = (reply(), *denied, reply(), *denied, reply(), *denied, 401)
    async with serving(*script, limits=AT_ONCE) as (_, client):
        said = [(await asyncio.gather(ask(client), return_exceptions=True))[0] for _ in script]
    *before, last = (one for one in said if isinstance(one, EndpointError))
    assert [type(one) for one in before] == [EndpointError] * (3 * len(denied))
    assert not any(one.is_of_request for one in before)
    assert type(last) is EndpointAccessError


async def test_a_request_that_is_denied_while_others_are_answered_fails_alone(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    is_denied, is_answered = asyncio.Event(), asyncio.Event()
    num_denied = 0

    def answered(body):
        nonlocal num_denied
        if body["messages"][0]["content"] == "hi":
            return reply()
        num_denied += 1
        is_denied.set()
        if num_denied > MOST_DENIED and is_answered.is_set():
            now_s[0] = 61.0
        return 401, "who?"

    async with serving(answered) as (_, client):
        await ask(client)
        denied = asyncio.create_task(ask(client, (Message(role="user", content="denied"),)))
        await is_denied.wait()
        await ask(client)
        is_answered.set()
        with pytest.raises(
            EndpointError, match=r"answered 401: who\?; .*tried \d+ times"
        ) as caught:
            await denied
    assert type(caught.value) is EndpointError


async def canceled_while_denied(client, *, times=MOST_DENIED):
    """Cancel a request in the pause after it was denied `times` times, as a deadline does."""
    left, is_denied = times, asyncio.Event()

    def count(line):
        nonlocal left
        if asyncio.current_task() is asking:
            left -= 1
        if not left:
            is_denied.set()

    with showing_troubles(count):
        asking = asyncio.create_task(ask(client))
        await is_denied.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.fixture
def soon(monkeypatch):
    """Requests are tried again soon, and each trouble is shown."""
    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(trouble, "SHOWN_EVERY_S", 0.0)


@pytest.mark.usefixtures("soon")
async def test_a_key_that_is_revoked_is_noticed_though_deadlines_end_the_requests():
    key = ApiKey("k", "MY_KEY")
    async with serving(reply(), 401, api_key=key) as (endpoint, client):
        await ask(client)
        client.require_access()
        waiting = asyncio.create_task(ask(client))
        await canceled_while_denied(client)
        fact = "answered 401: .*the same API key in MY_KEY before"
        with pytest.raises(EndpointAccessError, match=fact):
            client.require_access()
        # Neither those that wait for another try nor new ones are tried for a minute.
        with pytest.raises(EndpointAccessError, match=fact):
            await waiting
        num_before = len(endpoint.requests)
        with pytest.raises(EndpointAccessError, match=fact):
            await ask(client)
    assert len(endpoint.requests) == num_before + 1


@pytest.mark.usefixtures("soon")
async def test_an_answer_clears_a_key_whose_denied_requests_were_canceled():
    denied = [401] * MOST_DENIED
    script = (reply(), *denied, reply(), 401, reply())
    async with serving(*script) as (_, client):
        await ask(client)
        await canceled_while_denied(client)
        await ask(client)
        client.require_access()
        assert (await ask(client)).num_retries == 1


@pytest.mark.usefixtures("soon")
async def test_tries_that_are_canceled_before_they_are_denied_thrice_are_no_revoked_key():
    async with serving(reply(), 401, reply()) as (_, client):
        await ask(client)
        await canceled_while_denied(client, times=1)
        client.require_access()
        await ask(client)
