"""DeepDive: its questions, and web backends and a judge that are servers on loopback."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.asking import ask

from telescope_core import RolloutStatus, Sampling, Split
from telescope_core.errors import ConfigError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_deepdive import DeepDive
from telescope_env_telescope_deepdive.facts import FACTS, address_of, pages

URL = "https://example.org/opera"
WEB = {URL: "The Sydney Opera House was designed by Jorn Utzon, who was born in Copenhagen."}


class Web:
    """The two providers' searches and readers, and a judge, over one page.

    `failures` are statuses that the next requests are answered with.
    """

    def __init__(self):
        self.failures = []
        self.requests = []
        self.verdict = True
        self.is_garbled = False

    async def answer(self, request):
        body = await request.json()
        self.requests.append((request.path, body, request.headers))
        if self.failures:
            return web.json_response({"message": "no"}, status=self.failures.pop(0))
        if self.is_garbled:
            return web.json_response({"message": "we have moved"})
        return await getattr(self, request.match_info["what"])(request, body)

    async def search(self, request, body):
        if "q" in body:
            rows = [{"title": "Opera", "link": url, "snippet": text} for url, text in WEB.items()]
            return web.json_response({"organic": rows[: body["num"]]})
        rows = [{"title": "Opera", "url": url, "content": text} for url, text in WEB.items()]
        return web.json_response({"results": rows[: body["max_results"]]})

    async def scrape(self, request, body):
        if body["url"] not in WEB:
            return web.json_response({"message": "cannot be read"}, status=400)
        return web.json_response({"text": WEB[body["url"]], "metadata": {"title": "Opera"}})

    async def extract(self, request, body):
        rows = [{"url": url, "raw_content": WEB[url]} for url in body["urls"] if url in WEB]
        return web.json_response({"results": rows, "failed_results": []})

    async def completions(self, request, body):
        content = json.dumps({"reason": "it is so", "is_right": self.verdict})
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        return web.json_response(
            {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        )


@asynccontextmanager
async def serving(fake):
    app = web.Application()
    app.router.add_post("/{what}", fake.answer)
    app.router.add_post("/v1/chat/{what}", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@pytest.fixture
def keys(monkeypatch):
    for name in ("SERPER_API_KEY", "TAVILY_API_KEY", "JUDGE_API_KEY"):
        monkeypatch.setenv(name, f"the-{name}")


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(environment, replies, *, index=0):
    request = ask(
        split=Split.EVAL, example_index=index, sampling=Sampling(max_tokens=16), deadline_s=30
    )
    client = InProcessEnvironment(environment, name="deepdive")
    rollout = await client.play(request, ScriptedClient(replies).policy("r"))
    return rollout, [one.content for one in rollout.messages if "<tool_response>" in one.content]


def gold(environment, index=0) -> str:
    return f"<answer>{environment.examples(Split.EVAL).example(index).answer}</answer>"


def on_web(backend, url, **more) -> DeepDive:
    return DeepDive.from_settings(
        {"backend": backend, "backend_url": url, "search_retry_budget_s": 2.0, **more}
    )


def test_every_question_has_its_pages():
    found = {page.address: page.text for page in pages()}
    assert len(found) == 2 * len(FACTS)
    for fact in FACTS:
        assert fact.person in found[address_of(fact.work)]
        assert fact.town in found[address_of(fact.person)]
        assert fact.year in found[address_of(fact.person)]
        assert fact.town not in fact.work


@pytest.mark.parametrize(
    ("backend", "header", "key"),
    [
        ("serper", "X-API-KEY", "the-SERPER_API_KEY"),
        ("tavily", "Authorization", "Bearer the-TAVILY_API_KEY"),
    ],
)
async def test_a_rollout_on_the_web(keys, backend, header, key):
    fake = Web()
    async with serving(fake) as url:
        environment = on_web(backend, url)
        assert environment.network == "always"
        rollout, told = await play(
            environment,
            [
                call("search", query="sydney opera house"),
                call("open", address=URL),
                call("find", address=URL, text="born in"),
                call("open", address="https://example.org/nothing"),
                call("open", address="ftp://example.org/x"),
                gold(environment),
            ],
        )
        await environment.close()
    assert rollout.reward == 1.0, rollout.error
    assert f"address: {URL}" in told[0]
    assert "designed by Jorn Utzon" in told[1]
    assert "born in Copenhagen" in told[2]
    assert "there is no page at 'https://example.org/nothing'" in told[3]
    assert "there is no page at 'ftp://example.org/x'" in told[4]
    assert rollout.metrics["pages_read"] == 1
    assert {headers[header] for _, _, headers in fake.requests} == {key}
    assert len(fake.requests) == 3, "a page is fetched once in a rollout, and only from the web"


@pytest.mark.parametrize("backend", ["serper", "tavily"])
async def test_a_search_that_fails_is_a_failure_and_no_reward(keys, backend):
    fake = Web()
    async with serving(fake) as url:
        environment = on_web(backend, url, search_retry_budget_s=0.0)
        for tool in (call("search", query="x"), call("open", address=URL)):
            fake.failures = [503]
            rollout, _ = await play(environment, [tool, gold(environment)])
            assert rollout.status is RolloutStatus.FAILED
            assert rollout.reward is None
            assert f"SearchError: {backend}: " in rollout.error
            assert "503" in rollout.error
        fake.failures = [403]
        rollout, _ = await play(environment, [call("search", query="x")])
        assert rollout.error.startswith("EndpointAccessError")
        fake.is_garbled = True
        rollout, _ = await play(environment, [call("search", query="x"), gold(environment)])
        assert rollout.status is RolloutStatus.FAILED
        assert "the answer has no list" in rollout.error
        await environment.close()


@pytest.mark.slow
async def test_a_busy_backend_is_asked_again(keys):
    fake = Web()
    fake.failures = [429, 503]
    async with serving(fake) as url:
        environment = on_web("serper", url, search_retry_budget_s=20.0)
        rollout, told = await play(environment, [call("search", query="x"), gold(environment)])
        await environment.close()
    assert rollout.reward == 1.0
    assert f"address: {URL}" in told[0]
    assert len(fake.requests) == 3


async def test_requests_at_the_same_time_are_bounded(keys):
    fake = Web()
    most = open_now = 0
    search = fake.search

    async def counted(request, body):
        nonlocal most, open_now
        open_now += 1
        most = max(most, open_now)
        for _ in range(5):
            await asyncio.sleep(0)
        open_now -= 1
        return await search(request, body)

    fake.search = counted
    async with serving(fake) as url:
        environment = on_web("tavily", url, max_concurrent=2)
        replies = [call("search", query="x"), gold(environment)]
        rollouts = await asyncio.gather(*(play(environment, replies) for _ in range(12)))
        await environment.close()
    assert {rollout.reward for rollout, _ in rollouts} == {1.0}
    assert most <= 2


def test_a_missing_key_is_told_before_anything_is_played(monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="SERPER_API_KEY"):
        DeepDive.from_settings({"backend": "serper"})
    monkeypatch.setenv("SERPER_API_KEY", "a key")
    assert DeepDive.from_settings({"backend": "serper"}).network == "always"


async def test_the_judge_is_asked_only_where_words_differ(keys):
    fake = Web()
    async with serving(fake) as url:
        judge = {"base_url": f"{url}/v1", "model": "judge", "api_key_env": "JUDGE_API_KEY"}
        environment = DeepDive.from_settings({"grading": "judge", "judge": judge})
        assert environment.network == "always"
        assert (await play(environment, [gold(environment)]))[0].reward == 1.0
        assert (await play(environment, ["no tags"]))[0].reward == 0.0
        assert fake.requests == []
        for verdict in (True, False):
            fake.verdict = verdict
            rollout, _ = await play(environment, ["<answer>in other words</answer>"])
            assert rollout.reward == float(verdict)
            assert rollout.metrics["judge/calls"] == 1
        fake.failures = [400] * 9
        rollout, _ = await play(environment, ["<answer>in other words</answer>"])
        assert rollout.status is RolloutStatus.FAILED
        assert rollout.reward is None
        await environment.close()
    assert fake.requests[0][2]["Authorization"] == "Bearer the-JUDGE_API_KEY"


async def test_questions_of_ones_own(tmp_path):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(60)]
    table = tmp_path / "questions.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    environment = DeepDive.from_settings({"questions": str(table)})
    assert environment.network == "none"
    example = environment.examples(Split.EVAL).example(0)
    rollout, _ = await play(environment, environment.gold_answer(example))
    assert rollout.reward == 1.0
    assert "<answer>" in rollout.messages[1].content
    on_hub = {"questions": "someone/questions", "questions_revision": "a" * 40}
    assert DeepDive.from_settings(on_hub).network == "load"
