"""The protocol over a socket in this process: the same answers, and nothing that must not cross."""

import asyncio
import re
from dataclasses import replace

import pytest
from aiohttp import web
from tests.core.one_rollout import wait_for_ever
from wire_cases import WireInThisProcess, request

from telescope_core.base.chains import sampled_tokens
from telescope_core.base.retries import failure_text
from telescope_core.chat.client import ChatClient
from telescope_core.errors import (
    CodeExitError,
    ConfigError,
    ContextLengthError,
    EndpointError,
    EnvironmentProcessError,
)
from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.processes import StageDeadlines
from telescope_core.scripted import ScriptedClient
from telescope_core.types import (
    ChatEndpoint,
    Completion,
    Group,
    Message,
    RolloutStatus,
    Split,
    StopReason,
)

SECRET_IDS = (424242, 31337)
SECRET = sampled_tokens((1, 2, 3), SECRET_IDS, (-0.125, -0.5))


def here(name: str) -> InProcessEnvironment:
    environment = load_environment_class(f"worker_toys:{name}").from_settings({})
    return InProcessEnvironment(environment, name="toy", version="1")


def sampled(text: str) -> Completion:
    return Completion(
        message=Message(role="assistant", content=text),
        finish_reason="stop",
        tokens=SECRET,
        oldest_version=3,
        newest_version=4,
        num_prompt_tokens=3,
        num_completion_tokens=2,
    )


def without_times(rollout):
    turns = tuple(replace(turn, started_s=0.0, ended_s=0.0) for turn in rollout.turns)
    return replace(rollout, turns=turns, score_s=0.0)


@pytest.mark.parametrize("name", ["Echo", "Counting", "BadReward"])
async def test_a_rollout_is_the_same_over_the_wire(wire, name):
    pool, local = wire(name), here(name)
    assert await pool.describe() == await local.describe()
    assert await pool.example(Split.EVAL, 3) == await local.example(Split.EVAL, 3)
    for index in range(4):
        script = [sampled("1"), sampled("a"), sampled(str(index))]
        far = await pool.play(request(index), ScriptedClient(script).policy("r"))
        near = await local.play(request(index), ScriptedClient(script).policy("r"))
        assert without_times(far) == without_times(near)
        assert [turn.completion for turn in far.turns] == script[: len(far.turns)]
    if name != "BadReward":
        far, near = await pool.gold(Split.EVAL, 2), await local.gold(Split.EVAL, 2)
        assert without_times(far) == without_times(near)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (0, "EnvironmentLoadError: what Halves.format_prompt (...) returns has half of a"),
        (1, "EnvironmentLoadError: what Halves.env_response (...) returns: a user message has"),
        (2, "ValueError: it is \\ud83d (in reward Halves.fine (...))"),
        (3, ""),
    ],
)
async def test_half_of_a_surrogate_pair_is_escaped_or_names_its_place(wire, index, error):
    far, near = [
        await one.play(request(index), ScriptedClient([sampled("1")] * 2).policy("r"))
        for one in (wire("Halves"), here("Halves"))
    ]
    assert without_times(replace(far, turns=())) == without_times(replace(near, turns=()))
    assert re.sub(r"\([^(]*worker_toys.py:\d+\)", "(...)", far.error or "").startswith(error)
    assert far.status is (RolloutStatus.FAILED if error else RolloutStatus.KEPT)
    if not error:
        half = r"\ud83d"
        assert (far.tags, far.golden_answers) == ({half: half}, {"half": half})
        assert [(note.key, note.value) for note in far.info] == [(half, half)]


async def test_what_a_group_reward_raises_is_told_with_its_place(wire):
    expected = r"KeyError: '.*' \(in group_reward Halves.shared \(.*worker_toys.py:\d+\)\)"
    for client in (wire("Halves"), here("Halves")):
        played = await client.play(request(3), ScriptedClient([sampled("1")]).policy("r"))
        group = Group(id="g", environment="toy", example_id="records", rollouts=(played,))
        with pytest.raises(Exception, match="shared") as raised:
            await client.score_group(Split.TRAIN, 3, group)
        assert re.fullmatch(expected, failure_text(raised.value))


async def test_group_rewards_keep_the_tokens_of_the_host(wire):
    pool, local = wire(), here("Echo")
    script = [sampled("0")]
    rollouts = [
        await pool.play(request(0, rollout=i), ScriptedClient(script).policy("r")) for i in range(3)
    ]
    group = Group(id="g", environment="toy", example_id="x", rollouts=tuple(rollouts))
    scored = await pool.score_group(Split.TRAIN, 0, group)
    assert scored == await local.score_group(Split.TRAIN, 0, group)
    assert [rollout.reward for rollout in scored.rollouts] == [2.0] * 3
    assert scored.rollouts[0].turns[0].completion.tokens == SECRET


async def test_token_ids_and_logprobs_never_cross(wire, monkeypatch):
    place = WireInThisProcess("worker_toys:Counting")
    seen = bytearray()
    pool = wire(place=place)
    await pool.describe()
    connection = place.servings[0].connection
    receive = connection.data_received
    monkeypatch.setattr(
        connection, "data_received", lambda data: (seen.extend(data), receive(data))
    )
    played = await pool.play(request(1), ScriptedClient([sampled("7")]).policy("r"))
    group = Group(id="g", environment="toy", example_id="x", rollouts=(played,))
    await pool.score_group(Split.TRAIN, 1, group)
    assert len(played.turns) == 3
    assert b"assistant" in seen
    for secret in (SECRET_IDS[0].to_bytes(4), SECRET_IDS[1].to_bytes(2), b"\xbf\xc0"):
        assert secret not in seen


async def test_the_endpoint_of_a_policy_reaches_the_environment(wire):
    class WithEndpoint:
        endpoint = ChatEndpoint(base_url="http://127.0.0.1:1/v1", api_key="k", model="m")
        complete = ScriptedClient(["0"]).policy("r").complete

    pool = wire("TellsEndpoint")
    played = await pool.play(request(), WithEndpoint())
    assert played.tags["endpoint"] == "http://127.0.0.1:1/v1 k m"


async def test_a_worker_cannot_make_up_turns_or_be_another_rollout(wire):
    played = await wire("Liar").play(request(2, rollout=3), ScriptedClient(["0"]).policy("r"))
    assert (played.environment, played.group_id, played.index) == ("toy", "g2", 3)
    assert [turn.completion.tokens for turn in played.turns] == [None]


async def test_what_a_policy_raises_is_the_reason_of_the_rollout(wire):
    pool = wire()
    for error, text in [
        (EndpointError("the server is busy"), "EndpointError: the server is busy"),
        (KeyError("odd"), "EndpointError: KeyError: 'odd'"),
    ]:
        played = await pool.play(request(), ScriptedClient([error]).policy("r"))
        assert (played.status, played.error) == (RolloutStatus.FAILED, text)
        assert played.reward is None
    with pytest.raises(IndexError, match="example 99 of 40"):
        await pool.example(Split.TRAIN, 99)


async def test_another_event_loop_is_refused(wire):
    pool = wire()
    await pool.describe()
    for ask in (lambda: pool.example(Split.TRAIN, 0), pool.close):
        with pytest.raises(ConfigError, match=r"within one asyncio\.run"):
            await asyncio.to_thread(lambda ask=ask: asyncio.run(asyncio.wait_for(ask(), 60)))
    assert (await pool.example(Split.TRAIN, 0)).id


async def test_a_deadline_in_the_worker_withdraws_the_model_request(wire):
    cancelled = asyncio.Event()

    class Slow:
        endpoint = None

        async def complete(self, messages, sampling, *, tools=()):
            try:
                await wait_for_ever()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    played = await wire().play(request(deadline_s=60.0), Slow())
    assert played.stop_reason is StopReason.TIMEOUT
    text = "the rollout exceeded its deadline of 60 s while it waited for the answer of the policy"
    assert played.error == f"TimeoutError: {text}"
    await asyncio.wait_for(cancelled.wait(), 60)


class SlotServer:
    """A chat server that never answers and counts the requests it works on."""

    def __init__(self):
        self.num_busy = 0
        self.is_idle = asyncio.Event()
        self.is_full = asyncio.Event()
        self.full_at = 1

    async def answer(self, _):
        self.num_busy += 1
        if self.num_busy == self.full_at:
            self.is_full.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.num_busy -= 1
            if not self.num_busy:
                self.is_idle.set()
        return web.json_response({})


@pytest.fixture
async def slots():
    """A server with cancellation of handlers, on loopback, and a client of it."""
    server = SlotServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = ChatClient(f"http://127.0.0.1:{port}/v1", "m")
    yield server, client
    await client.close()
    await runner.cleanup()


@pytest.mark.parametrize("name", ["Echo", "Shielded"])
@pytest.mark.parametrize("how", ["task", "cancel"])
async def test_cancelling_frees_the_slot_of_the_server(wire, slots, how, name):
    server, client = slots
    server.full_at = 16
    place = WireInThisProcess(f"worker_toys:{name}")
    pool = wire(place=place)
    tasks = [
        asyncio.create_task(
            pool.play(request(i % 4, rollout=i, deadline_s=600), client.policy("r"))
        )
        for i in range(16)
    ]
    await asyncio.wait_for(server.is_full.wait(), 60)
    if how == "task":
        for task in tasks:
            task.cancel()
    else:
        for index in range(16):
            await pool.cancel(f"g{index % 4}/{index}")
    await asyncio.wait_for(server.is_idle.wait(), 60)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    if how == "task":
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    else:
        assert {one.status for one in ended} == {RolloutStatus.CANCELLED}
        assert {one.reward for one in ended} == {None}
    await pool.health()
    assert not place.servings[0].completions, "nothing waits for an answer any more"


async def test_a_thousand_cancelled_rollouts_leave_nothing(wire):
    place = WireInThisProcess("worker_toys:Echo")
    pool = wire(place=place)
    await pool.describe()
    tasks = [
        asyncio.create_task(
            pool.play(request(i % 40, rollout=i), ScriptedClient(["0"], delay_s=60).policy("r"))
        )
        for i in range(1000)
    ]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    done = await asyncio.gather(*tasks[::2], return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in done)
    assert pool.stats()["in_flight"] == 500
    for index in range(1, 1000, 2):
        await pool.cancel(f"g{index % 40}/{index}")
    rest = await asyncio.gather(*tasks[1::2])
    assert sorted(one.index for one in rest) == list(range(1, 1000, 2))
    assert {one.status for one in rest} == {RolloutStatus.CANCELLED}
    assert pool.stats()["in_flight"] == 0
    serving = place.servings[0]
    await pool.health()
    assert not serving._tasks
    assert not serving.completions


async def test_64_at_once_are_as_one_by_one(wire):
    pool, local = wire("Counting"), here("Counting")
    requests = [request(i % 8, rollout=i) for i in range(64)]
    scripts = [["x", "y", str(one.example_index % 3)] for one in requests]
    together = await asyncio.gather(
        *(
            pool.play(one, ScriptedClient(script, delay_s=0.001).policy("r"))
            for one, script in zip(requests, scripts, strict=True)
        )
    )
    alone = [
        await local.play(one, ScriptedClient(script).policy("r"))
        for one, script in zip(requests, scripts, strict=True)
    ]
    assert [without_times(one) for one in together] == [without_times(one) for one in alone]


@pytest.mark.slow
async def test_a_rollout_that_does_not_end_costs_its_worker(wire):
    deadlines = StageDeadlines(grace_s=0.1, cancel_s=0.1, close_s=0.1)
    pool = wire("Stubborn", deadlines=deadlines)
    played = await pool.play(request(deadline_s=0.05), ScriptedClient(["0"]).policy("r"))
    assert played.stop_reason is StopReason.TIMEOUT
    assert "did not end within its deadline of 0.05 s" in played.error
    other = asyncio.create_task(
        pool.play(request(deadline_s=0.05), ScriptedClient(["0"]).policy("r"))
    )
    assert (await other).stop_reason is StopReason.TIMEOUT
    assert pool.stats()["restarts"] == 1


async def test_a_closed_pool_says_so(wire):
    pool = wire()
    await pool.describe()
    await pool.close()
    await pool.close()
    client = ScriptedClient(["0"])
    with pytest.raises(EnvironmentProcessError, match="toy are closed"):
        await pool.play(request(), client.policy("r"))
    assert pool.stats()["in_flight"] == 0


async def test_limits_are_outcomes_across_the_wire_too(wire):
    class Slow:
        endpoint = None

        async def complete(self, messages, sampling, *, tools=()):
            await wait_for_ever()

    late = await wire().play(replace(request(deadline_s=60.0), scores_at_deadline=True), Slow())
    assert (late.status, late.stop_reason) == (RolloutStatus.KEPT, StopReason.TIMEOUT)
    assert late.reward is not None
    full = ContextLengthError("a prompt of 90 tokens, but max_model_len is 64")
    pool = wire("Counting")
    played = await pool.play(request(), ScriptedClient(["one", "two", full]).policy("r"))
    assert (played.status, played.stop_reason) == (RolloutStatus.KEPT, StopReason.CONTEXT_LENGTH)
    assert len(played.turns) == 2


@pytest.mark.parametrize("where", ["wire", "workers"])
async def test_what_is_no_exception_fails_its_rollout_and_leaves_the_worker(wire, workers, where):
    pool = {"wire": wire, "workers": workers}[where]("Escapes")
    played = [
        await pool.play(request(index), ScriptedClient([sampled("a")]).policy("r"))
        for index in range(4)
    ]
    assert [rollout.status_reason for rollout in played] == [
        *("CodeExitError", "StrayCancelError", "StrayCancelError", "")
    ]
    assert [rollout.status for rollout in played[:3]] == [RolloutStatus.FAILED] * 3
    assert "sys.exit(None) was called (" in played[0].error
    assert [len(rollout.turns) for rollout in played[:2]] == [1, 1]
    with pytest.raises(CodeExitError, match=r"sys.exit\('no gold'\) was called"):
        await pool.gold(Split.EVAL, 0)
    assert pool.stats()["restarts"] == 0
