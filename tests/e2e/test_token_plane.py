"""The token plane of a live vLLM server: versions, cancellation, loss, refusal."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from telescope_core.errors import ConfigError, EndpointError
from telescope_core.types import Sampling
from telescope_train.inference.client import TokenClient, parse_reply
from telescope_train.inference.generation import (
    Generation,
    Request,
    RequestAbortedError,
    ServerLostError,
)
from telescope_train.inference.server import ServerProcess, ServerSettings
from telescope_train.inference.wire import (
    PAUSE_AND_CLEAR,
    PAUSE_AND_KEEP,
    PAUSE_PATH,
    TOKEN_PLANE_PATH,
    CancelRequest,
    TokenRequest,
)

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7]
LENGTH = 800
DEADLINE_S = 60.0


@pytest.fixture
async def client(vllm_server: str) -> AsyncIterator[TokenClient]:
    """A client of the session's server."""
    client = TokenClient(vllm_server)
    yield client
    # Other tests of the session meet the same server: at work, and with its first weights.
    await client.control("/resume")
    await client.control("/update_weight_version", {"new_version": "default"})
    await client.close()


async def generate(
    client: TokenClient,
    length: int,
    *,
    priority: int = 0,
    prompt: Sequence[int] = PROMPT,
    **params: Any,
) -> Generation:
    """Sample exactly `length` tokens: a random model's end of turn does not stop it."""
    plane = await client._open_plane()
    sampling = {"max_tokens": length, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    encoded = msgspec.Raw(msgspec.msgpack.encode({**sampling, **params}))
    asked = plane.request(prompt, sampling=encoded, cache_salt="test", priority=priority)
    # A server that an earlier test left paused answers nothing.
    reply = await asyncio.wait_for(asked, DEADLINE_S)
    return parse_reply(reply, client.base_url)


async def num_running(client: TokenClient) -> float:
    """Return vLLM's own count of requests that hold a slot or wait for one."""
    async with aiohttp.ClientSession() as session, session.get(f"{client.base_url}/metrics") as got:
        lines = (await got.text()).splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


async def until_running(client: TokenClient, wanted: int) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while await num_running(client) != wanted:
        assert time.monotonic() < give_up_s, f"waited {DEADLINE_S} s for {wanted} requests"


async def test_a_generation_has_a_logprob_for_each_token(client: TokenClient) -> None:
    found = await asyncio.gather(*(generate(client, 9) for _ in range(40)))
    for one in found:
        assert len(one.token_ids) == len(one.logprobs) == 9
        assert all(value <= 0.0 for value in one.logprobs)


async def test_tokens_keep_the_version_they_were_sampled_under(client: TokenClient) -> None:
    await client.control(PAUSE_PATH, query=f"?{PAUSE_AND_KEEP}")
    await client.control("/update_weight_version", {"new_version": "7"})
    waiting = asyncio.create_task(generate(client, LENGTH))
    await client.control("/resume")
    await until_running(client, 1)
    await client.control(PAUSE_PATH, query=f"?{PAUSE_AND_KEEP}")
    assert not waiting.done(), "the request ended before the version changed"
    await client.control("/update_weight_version", {"new_version": "8"})
    await client.control("/resume")
    generation = await asyncio.wait_for(waiting, DEADLINE_S)
    assert (generation.oldest_version, generation.newest_version) == (7, 8)
    assert len(generation.token_ids) == len(generation.logprobs) == LENGTH


async def test_a_request_past_the_output_processor_ends_as_one_through_it(
    client: TokenClient,
) -> None:
    # A stop string takes text, so it takes vLLM's output processor; this one is never met.
    never = {"stop": ["no such words"], "detokenize": True}
    for params in ({"seed": 1}, {"seed": 2, "temperature": 0.5}, {"seed": 3, "top_k": 4}):
        past, through = await asyncio.gather(
            generate(client, 30, **params), generate(client, 30, **params, **never)
        )
        assert past == through
    stopping = {**params, "stop_token_ids": [past.token_ids[4]]}
    past, through = await asyncio.gather(
        generate(client, 30, **stopping), generate(client, 30, **stopping, **never)
    )
    assert past.finish_reason == "stop"
    assert past == through


async def test_where_the_time_of_a_request_went_is_told_and_counted(client: TokenClient) -> None:
    before = await counted(client)
    never = {"stop": ["no such words"], "detokenize": True}
    # The same prompt twice: the second one finds what the first one computed.
    past = await generate(client, 40)
    through = await generate(client, 40, **never)
    for one in (past, through):
        timing = one.timing
        assert timing is not None
        assert timing.queue_s >= 0
        assert timing.prefill_s > 0
        assert timing.decode_s > 0
        # It arrives before it is queued, and both clocks tell microseconds.
        assert timing.first_token_s >= timing.queue_s + timing.prefill_s - 0.01
    after = await counted(client)
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    assert change["vllm:generation_tokens_total"] == 80
    assert change["vllm:prompt_tokens_total"] == 2 * len(PROMPT)
    assert change["vllm:request_success_total"] == 2
    for histogram in (
        "e2e_request_latency_seconds",
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
    ):
        assert change[f"vllm:{histogram}_count"] == 2, histogram
    assert change["vllm:inter_token_latency_seconds_count"] == 2 * 39


async def counted(client: TokenClient) -> dict[str, float]:
    """Return the sum of each of vLLM's metrics over its labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{client.base_url}/metrics") as got:
        lines = (await got.text()).splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line.startswith("vllm:"):
            name, _, rest = line.partition("{")
            sums[name] = sums.get(name, 0.0) + float(rest.rsplit(" ", 1)[1])
    return sums


async def test_an_engine_that_fails_fails_what_waits_for_it() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.exceptions import EngineDeadError

    from telescope_train.inference.vllm_plugin.engine_thread import (
        EngineThreadClient,
        GrowingCompletion,
    )

    class Broken:
        """An engine whose first step raises."""

        def __init__(self, *_: Any) -> None:
            """Need no model."""

        def put(self, *_: Any) -> None:
            """Take a request."""

        def turn(self) -> None:
            """Fail."""
            raise MemoryError("no room for a step")

    core = EngineThreadClient(None, None, False, engine_class=Broken)  # type: ignore[arg-type]
    request = EngineCoreRequest(
        "one",
        PROMPT,
        None,
        SamplingParams(),
        None,
        0.0,
        None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    waiting = asyncio.create_task(core.complete(request, GrowingCompletion("one")))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError):
        await core.get_output_async()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(waiting, DEADLINE_S)
    with pytest.raises(EngineDeadError):
        await core.complete(request, GrowingCompletion("one"))


async def test_what_a_failing_pause_has_ended_is_handed_out() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from telescope_train.inference.vllm_plugin.engine_thread import (
        EngineStep,
        EngineThreadClient,
        GrowingCompletion,
    )

    class HalfPaused:
        """An engine whose pause ends what runs, and then raises."""

        def __init__(self, *_: Any) -> None:
            self.running: list[GrowingCompletion] = []
            self.ended: list[GrowingCompletion] = []

        def put(self, _: Any, completion: GrowingCompletion) -> None:
            self.running.append(completion)

        def turn(self) -> EngineStep:
            ended, self.ended = self.ended, []
            return EngineStep([], ended, False)

        def pause_scheduler(self) -> None:
            self.running[0].finish_reason = "abort"
            self.ended, self.running = self.running, []
            raise RuntimeError("the cache could not be cleared")

    core = EngineThreadClient(None, None, False, engine_class=HalfPaused)  # type: ignore[arg-type]
    nothing = {"cache_salt": None, "data_parallel_rank": None}
    request = EngineCoreRequest("one", PROMPT, None, SamplingParams(), None, 0.0, None, **nothing)
    completion = GrowingCompletion("one")
    waiting = asyncio.create_task(core.complete(request, completion))
    outputs = asyncio.create_task(core.get_output_async())
    # Until the engine has taken the request in, and nothing else would make it step.
    while core._has_work.is_set() or "one" not in core._awaited:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="could not be cleared"):
        await core.call_utility_async("pause_scheduler")
    await asyncio.wait_for(waiting, DEADLINE_S)
    assert completion.finish_reason == "abort"
    outputs.cancel()


@pytest.mark.parametrize("query", [PAUSE_AND_CLEAR, PAUSE_AND_KEEP])
async def test_a_pause_stops_requests_and_lets_them_go_on(client: TokenClient, query: str) -> None:
    running = asyncio.create_task(generate(client, LENGTH))
    await until_running(client, 1)
    await asyncio.wait_for(client.control(PAUSE_PATH, query=f"?{query}"), DEADLINE_S)
    later = asyncio.create_task(generate(client, 2))
    # The server goes on answering while the engine stands still.
    await num_running(client)
    assert not running.done()
    assert not later.done()
    await client.control("/resume")
    assert len((await asyncio.wait_for(running, DEADLINE_S)).token_ids) == LENGTH
    assert len((await asyncio.wait_for(later, DEADLINE_S)).token_ids) == 2


async def test_an_aborting_pause_ends_requests_as_failures(client: TokenClient) -> None:
    running = asyncio.create_task(generate(client, LENGTH))
    await until_running(client, 1)
    await client.control("/pause", query="?mode=abort")
    with pytest.raises(RequestAbortedError, match="aborted the request"):
        await asyncio.wait_for(running, DEADLINE_S)
    await client.control("/resume")
    assert (await generate(client, 1)).finish_reason == "length"


async def test_later_turns_go_before_what_came_first(client: TokenClient) -> None:
    """All slots are taken by requests of which two end at a time; eight more wait for those."""
    ended: list[int] = []

    async def asked(priority: int) -> None:
        await generate(client, 30, priority=priority)
        ended.append(priority)

    # While the engine stands still, all that are sent come to it in their order, on one connection.
    await client.control(PAUSE_PATH, query=f"?{PAUSE_AND_KEEP}")
    slots = [asyncio.create_task(generate(client, 200 + index // 2)) for index in range(256)]
    waiting = [asyncio.create_task(asked(priority)) for priority in (0, 0, 0, 0, -3, -3, -3, -3)]
    await num_running(client)  # An answer that comes after the frames were read.
    await client.control("/resume")
    await asyncio.wait_for(asyncio.gather(*slots, *waiting), DEADLINE_S)
    assert ended == [-3, -3, -3, -3, 0, 0, 0, 0]


async def test_an_unknown_kind_of_pause_is_refused(client: TokenClient) -> None:
    with pytest.raises(EndpointError, match=r"cache=clear or \?cache=keep"):
        await client.control(PAUSE_PATH, query="?cache=later")
    assert (await generate(client, 1)).finish_reason == "length"


async def test_a_request_cancelled_in_its_own_frame_leaves_nothing_behind(
    client: TokenClient,
) -> None:
    plane = await client._open_plane()
    encoded = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": LENGTH}))
    frame = [
        TokenRequest(10_000, array("i", PROMPT).tobytes(), encoded, cache_salt="", priority=0),
        CancelRequest(10_000),
    ]
    await plane._send(frame)
    # The same number again: it is answered as one that was never used.
    await plane._send([TokenRequest(10_000, b"", encoded, cache_salt="", priority=0)])
    assert len((await generate(client, 3)).token_ids) == 3
    await until_running(client, 0)


async def test_cancelled_requests_free_their_slots(client: TokenClient) -> None:
    running = [asyncio.create_task(generate(client, LENGTH)) for _ in range(30)]
    await until_running(client, 30)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until_running(client, 0)
    assert client.num_in_flight == 0


async def test_a_lost_connection_fails_its_requests_and_is_opened_anew(vllm_server: str) -> None:
    client, other = TokenClient(vllm_server), TokenClient(vllm_server)
    running = asyncio.create_task(generate(client, LENGTH))
    await until_running(other, 1)
    assert client._plane is not None
    await client._plane._socket.close()
    with pytest.raises(EndpointError, match="lost the inference server"):
        await running
    await until_running(other, 0)
    assert len((await generate(client, 3)).token_ids) == 3
    await client.close()
    await other.close()


@pytest.mark.parametrize("stop", [[], ["no such text"]])
async def test_what_was_sampled_is_known_when_the_server_is_lost(
    vllm_server: str, stop: list[str]
) -> None:
    """Of requests with stop strings too, which go through vLLM's output processor."""
    client = TokenClient(vllm_server)
    plane = await client._open_plane()
    running = asyncio.create_task(
        generate(client, LENGTH, seed=1, stop=stop, detokenize=bool(stop))
    )
    async with asyncio.timeout(DEADLINE_S):
        while not (plane._waiting and plane._waiting[0]._so_far):
            await num_running(client)
        await plane._socket.close()
        with pytest.raises(ServerLostError, match="lost the inference server") as lost:
            await running
    begun = lost.value.begun
    assert begun is not None
    assert 0 < len(begun.token_ids) < LENGTH
    assert [span.num_tokens for span in begun.spans] == [len(begun.token_ids)]
    # The same seed samples the same tokens: what arrived in parts is the beginning of the whole.
    whole = await generate(client, LENGTH, seed=1, stop=stop, detokenize=bool(stop))
    assert len(whole.token_ids) == LENGTH
    assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert whole.logprobs[: len(begun.token_ids)] == pytest.approx(begun.logprobs, abs=1e-5)
    await client.close()


async def test_a_request_that_cannot_be_served_is_refused_with_the_reason(
    client: TokenClient,
) -> None:
    with pytest.raises(EndpointError, match=r"maximum (model|context) length"):
        await client.generate(
            Request(prompt_ids=[5] * 1100, sampling=Sampling(max_tokens=1), cache_salt="test")
        )
    with pytest.raises(EndpointError, match="temperature"):
        await generate(client, 1, temperature=-1.0)


async def test_a_malformed_frame_closes_only_that_connection(client: TokenClient) -> None:
    url = f"{client.base_url}{TOKEN_PLANE_PATH}"
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
        await socket.send_bytes(b"\xc1")
        message = await asyncio.wait_for(socket.receive(), DEADLINE_S)
        assert message.type is aiohttp.WSMsgType.CLOSE
        assert message.data == aiohttp.WSCloseCode.PROTOCOL_ERROR
    assert len((await generate(client, 1)).token_ids) == 1


async def test_stop_strings_are_still_found(client: TokenClient) -> None:
    sampling = Sampling(max_tokens=100, stop=tuple("0123456789+-= "))
    request = Request(prompt_ids=PROMPT, sampling=sampling, cache_salt="test")
    found = await asyncio.gather(*(client.generate(request) for _ in range(8)))
    assert all(len(one.token_ids) == len(one.logprobs) for one in found)
    assert any(one.finish_reason == "stop" for one in found)


async def test_a_seed_decides_the_tokens_whoever_runs_beside_it(client: TokenClient) -> None:
    alone = [await generate(client, 12, seed=seed) for seed in range(4)]
    others = asyncio.gather(*(generate(client, 20) for _ in range(8)))
    beside = await asyncio.gather(*(generate(client, 12, seed=seed) for seed in range(4)))
    await others
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
    assert len({bytes(one.token_ids) for one in alone}) == 4
    unseeded = [await generate(client, 12) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_a_seed_decides_the_tokens_of_a_prompt_that_takes_several_steps(
    client: TokenClient,
) -> None:
    """An engine computes 4,096 tokens in a step, and the prompts of others leave it a part."""
    prompts = [[(place * (number + 1)) % 90 + 5 for place in range(900)] for number in range(12)]

    def asked(number: int):
        return generate(client, 4, prompt=prompts[number], seed=number)

    beside = await asyncio.gather(*(asked(number) for number in range(len(prompts))))
    alone = [await asked(number) for number in range(len(prompts))]
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]


async def test_a_server_is_asked_as_itself_alone(vllm_server: str, server_log: Path) -> None:
    """As a run would ask that has this address in its mind, and whose own server has left it."""
    other = TokenClient(vllm_server, identity="0123456789abcdef")
    assert not await other.is_alive()
    assert await other.metrics_page() is None
    for path in (PAUSE_PATH, "/resume", "/start_weight_update", "/update_weights"):
        with pytest.raises(ServerLostError, match=r"another inference server.*0123456789abcdef"):
            await other.control(path, query=f"?{PAUSE_AND_KEEP}", is_repeatable=True)
    with pytest.raises(ServerLostError, match="another inference server"):
        await generate(other, 1, seed=1)
    port = int(vllm_server.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"{port}.*in use by process \d+ .*vllm_plugin"):
        ServerProcess(ServerSettings(model_path="m", port=port, log_path=server_log))
    await other.close()
