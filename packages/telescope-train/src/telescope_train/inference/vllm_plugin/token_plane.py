"""The server's side of the token plane: an ASGI middleware of vLLM's API server.

It is named on vLLM's command line with `--middleware`. One WebSocket carries all requests of a
client, in the frames of `telescope_train.inference.wire`. When a connection closes, its requests
are aborted.
"""

import asyncio
from array import array
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any, NamedTuple

import msgspec
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import RequestStateStats

from telescope_train.inference.vllm_plugin.engine_thread import (
    EngineThreadClient,
    GrowingCompletion,
)
from telescope_train.inference.vllm_plugin.http_server import App, Message, Once, Receive, Send
from telescope_train.inference.vllm_plugin.request_stats import (
    MeasuredRequest,
    emit_span,
    timing_of,
)
from telescope_train.inference.wire import (
    ENGINE_PATH,
    PAUSE_AND_ABORT,
    PAUSE_AND_KEEP,
    PAUSE_PATH,
    PAUSE_QUERIES,
    PROGRESS_S,
    SLEEP_PATHS,
    TOKEN_PLANE_PATH,
    ClientFrame,
    Outbox,
    TokenReply,
    TokenRequest,
    VersionSpan,
    routes_of,
)
from telescope_train.observability.calls import ServerTiming

logger = init_logger("vllm.telescope")
_NO_SLEEP = (
    b'{"error": "this server computes on CPU, where vLLM cannot sleep: it would free no memory and '
    b'answer no request until it is woken. Stop the server instead"}'
)
_PROTOCOL_ERROR = 1002
"""The WebSocket close code for a malformed frame (RFC 6455)."""
_connection_numbers = count()


class Part(NamedTuple):
    """The tokens of a completion from some position on, read between two steps of the event loop.

    Nothing is recorded for it: the tokens are where the engine puts them anyway.
    """

    token_ids: "array[int]"
    """[T] int32."""
    logprobs: "array[float]"
    """[T] float32, nats."""
    versions: tuple[VersionSpan, ...]
    """Versions for the whole completion, from its first token on."""


def part_of_completion(completion: GrowingCompletion, start: int) -> Part:
    """Return the tokens from the engine's thread, from token `start` on."""
    # That thread may be between two of its three appends: the log-probs come last, and the version
    # before the tokens. What has a log-prob is therefore complete.
    end = len(completion.logprobs)
    return Part(
        completion.token_ids[start:end],
        completion.logprobs[start:end],
        tuple(span for span in completion.versions if span.start < end),
    )


def part_of_output(engine: AsyncLLM, request_id: str, start: int) -> Part:
    """Return the tokens from vLLM's output processor, from token `start` on."""
    processor = engine.output_processor
    internal = processor.external_req_ids.get(request_id)
    state: Any = processor.request_states.get(internal[0]) if internal else None
    logprobs = None if state is None else state.logprobs_processor.logprobs
    if state is None or logprobs is None:
        return Part(array("i"), array("f"), ())
    starts = logprobs.start_indices
    end = len(starts)
    return Part(
        array("i", islice(state.detokenizer.output_token_ids, start, end)),
        array("f", (logprobs.logprobs[one] for one in islice(starts, start, end))),
        tuple(VersionSpan(*span) for span in state.weight_version_starts if span[1] < end),
    )


class EngineLife:
    """A sign of life of the engine itself; concurrent callers share one question.

    vLLM's `/health` says that no error has come from the engine, but one that hangs sends none.
    This question is answered between two of its steps, which proves that steps end, however long
    their prompts are.
    """

    def __init__(self) -> None:
        self._asking: asyncio.Task[Any] | None = None

    async def until_heard(self, engine: Any) -> None:
        """Return when `engine`, an `AsyncLLM`, answers; raises EngineDeadError if it is dead."""
        if engine.errored:
            raise EngineDeadError
        if self._asking is None or self._asking.done():
            # All engines: with data parallelism a server has several.
            question = engine.engine_core.call_utility_all_async("is_scheduler_paused")
            self._asking = asyncio.create_task(question)
        # Shielded, because others may wait for the same answer.
        await asyncio.shield(self._asking)


class TokenPlane:
    """Serves the paths of the token plane and passes all other requests on to vLLM."""

    def __init__(self, app: App) -> None:
        self._app = Once(app)
        self._life = EngineLife()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "websocket" and scope["path"] == TOKEN_PLANE_PATH:
            # Looked up for each connection, because vLLM sets it only after it has built the app.
            engine: AsyncLLM = scope["app"].state.engine_client
            _count_in_metrics(engine)
            await PlaneConnection(engine, receive, send).serve()
        elif scope["type"] == "http" and scope["path"] == PAUSE_PATH:
            await _pause(scope["app"].state.engine_client, scope["query_string"].decode(), send)
        elif scope["type"] == "http" and scope["path"] == ENGINE_PATH:
            await self._say_alive(scope["app"].state.engine_client, send)
        elif scope["type"] == "http" and scope["path"] in SLEEP_PATHS and _cannot_sleep():
            await _answer(send, 501, _NO_SLEEP)
        else:
            await self._app(scope, receive, send)

    async def _say_alive(self, engine: AsyncLLM, send: Send) -> None:
        try:
            # In an update the engine works for a numbered call and ends no step. Whoever made the
            # call watches it, so that the server itself is all that is asked about here.
            if not self._app.is_making_calls:
                await self._life.until_heard(engine)
        except EngineDeadError:
            await _answer(send, 503, b'{"error": "the engine is dead"}')
        else:
            await _answer(send, 200, b"{}")


def _cannot_sleep() -> bool:
    """Return whether sleep would free nothing, although vLLM reports success."""
    return current_platform.is_cpu()


def _count_in_metrics(engine: AsyncLLM) -> None:
    """Make requests that bypass vLLM's output processor count in its metrics."""
    core, loggers = engine.engine_core, engine.logger_manager
    if isinstance(core, EngineThreadClient) and loggers is not None:
        core.on_stats = lambda stats: loggers.record(scheduler_stats=None, iteration_stats=stats)


async def _pause(engine: Any, query: str, send: Send) -> None:
    """Pause between two steps, and answer once the engine is paused."""
    known = query in PAUSE_QUERIES
    if known:
        mode = "abort" if query == PAUSE_AND_ABORT else "keep"
        clear_cache = query != PAUSE_AND_KEEP
        await engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
    expected = " or ".join(f"?{one}" for one in PAUSE_QUERIES)
    body = b"{}" if known else msgspec.json.encode({"error": f"expected {expected}"})
    await _answer(send, 200 if known else 400, body)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Growing:
    """A running request, and the number of its tokens that have been sent."""

    def __init__(self, part_from: Callable[[int], Part]) -> None:
        """`part_from` returns the tokens from a given one on."""
        self._part_from = part_from
        self.num_sent = 0

    def rest(self) -> Part:
        """Return the tokens that have not been sent yet, and count them as sent."""
        part = self._part_from(self.num_sent)
        self.num_sent += len(part.token_ids)
        return part


class PlaneConnection:
    """The connection of one client: its requests in progress and the replies to send."""

    def __init__(self, engine: AsyncLLM, receive: Receive, send: Send) -> None:
        self._engine = engine
        self._receive = receive
        self._send = send
        # Clients number their requests from 0, and the engine's request ids must be unique.
        self._name = f"plane{next(_connection_numbers)}"
        self._running: dict[int, asyncio.Task[None]] = {}
        self._growing: dict[int, _Growing] = {}
        self._outbox = Outbox[TokenReply](self._send_frame)
        self._decoder = msgspec.msgpack.Decoder(ClientFrame)
        self._encoder = msgspec.msgpack.Encoder()

    async def serve(self) -> None:
        """Answer requests until the client disconnects, and then abort those that are left."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        # Replies are sent by a task of their own: many end in the same step and share a frame, and
        # reading must go on meanwhile, or a cancellation would wait behind a slow send.
        writer = asyncio.create_task(self._outbox.run())
        progress = asyncio.create_task(self._send_progress())
        try:
            while True:
                event = await self._receive()
                if event["type"] == "websocket.disconnect":
                    return
                self._take(self._decoder.decode(event.get("bytes") or b""))
        except msgspec.MsgspecError as error:
            # The ids in a malformed frame are unknown, so its requests cannot be answered one by
            # one. Closing makes the client fail all that it waits for.
            logger.warning("the token plane received a malformed frame: %s", error)
            await self._send(
                {"type": "websocket.close", "code": _PROTOCOL_ERROR, "reason": str(error)[:100]}
            )
        finally:
            # Canceling an answer aborts its request in the engine. Without that, requests of a
            # client that is gone would hold their slots to their end.
            tasks = [writer, progress, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, frame: ClientFrame) -> None:
        for item in frame:
            if isinstance(item, TokenRequest):
                task = asyncio.create_task(self._answer(item))
                self._running[item.id] = task
                # A callback and not a `finally` of the task: a task that is canceled before its
                # first step, by the same frame, never runs any of its code.
                task.add_done_callback(lambda _, number=item.id: self._running.pop(number, None))
            elif (running := self._running.get(item.id)) is not None:
                running.cancel()

    async def _answer(self, request: TokenRequest) -> None:
        try:
            self._outbox.put(await self._sample(request))
        # A cancellation is no `Exception`, and gets no reply: the client has stopped waiting.
        except Exception as error:  # noqa: BLE001 - a boundary: the client is told
            text = f"{type(error).__name__}: {error}"
            is_dead = isinstance(error, EngineDeadError)
            self._outbox.put(TokenReply(request.id, error=text, is_dead=is_dead))
        finally:
            self._growing.pop(request.id, None)

    async def _send_progress(self) -> None:
        """Send new tokens repeatedly, until the connection ends."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            for number, growing in self._growing.items():
                part = growing.rest()
                if part.token_ids:
                    self._outbox.put(_reply(number, part))

    async def _sample(self, request: TokenRequest) -> TokenReply:
        prompt_ids = array("i")
        prompt_ids.frombytes(request.prompt_ids)
        prompt = tokens_input(prompt_ids.tolist(), cache_salt=request.cache_salt)
        params = _sampling_params(bytes(request.sampling))
        request_id = f"{self._name}-{request.id}"
        core = self._engine.engine_core
        # Stop strings take text, which only the output processor makes. With the engine in another
        # process, all outputs come through it anyway.
        if isinstance(core, EngineThreadClient) and not params.stop:
            engine_request = self._engine.input_processor.process_inputs(
                request_id,
                prompt,
                params,
                supported_tasks=await self._engine.get_supported_tasks(),
                priority=request.priority,
                trace_headers=_trace_headers(request, is_tracing=self._is_tracing),
            )
            measured = (
                MeasuredRequest.from_request(engine_request) if self._engine.log_stats else None
            )
            completion = GrowingCompletion(request_id, measured=measured)
            growing = self._grows(request, partial(part_of_completion, completion))
            await core.complete(engine_request, completion)
            if self._is_tracing and measured is not None:
                emit_span(request_id, measured, engine_request)
            timing = None if measured is None else measured.timing
            return _reply(request.id, growing.rest(), completion.finish_reason, timing)
        # With `FINAL_ONLY` there is one output. Canceling this loop makes vLLM abort the request.
        growing = self._grows(request, partial(part_of_output, self._engine, request_id))
        final: RequestOutput | None = None
        async for output in self._engine.generate(
            prompt,
            params,
            request_id,
            priority=request.priority,
            trace_headers=_trace_headers(request, is_tracing=self._is_tracing),
        ):
            final = output
        if final is None:
            raise RuntimeError("the engine ended the request without an output")
        reason = final.outputs[0].finish_reason or ""
        timing = _timing_of_final(final)
        reply = _reply(request.id, _part_of_final(final, growing.num_sent), reason, timing)
        return msgspec.structs.replace(reply, routes=routes_of(final.outputs[0].routed_experts))

    @property
    def _is_tracing(self) -> bool:
        return self._engine.vllm_config.observability_config.otlp_traces_endpoint is not None

    def _grows(self, request: TokenRequest, part_from: "Callable[[int], Part]") -> "_Growing":
        growing = self._growing[request.id] = _Growing(part_from)
        return growing

    async def _send_frame(self, replies: list[TokenReply]) -> None:
        await self._send({"type": "websocket.send", "bytes": self._encoder.encode(replies)})


def _trace_headers(request: TokenRequest, *, is_tracing: bool) -> dict[str, str] | None:
    """Return the headers by which vLLM adds the request to a trace."""
    has_trace = is_tracing and request.traceparent
    return {"traceparent": request.traceparent} if has_trace else None


@lru_cache(maxsize=256)
def _sampling_params(content: bytes) -> SamplingParams:
    """Return vLLM's parameters, cached because the requests of a run use few different ones."""
    params = SamplingParams(**msgspec.msgpack.decode(content))
    # vLLM then copies them shallowly for each request. That is enough, because no request changes
    # the objects that they hold.
    params.skip_clone = True
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True
    return params


def _reply(
    request_id: int, part: Part, finish_reason: str = "", timing: ServerTiming | None = None
) -> TokenReply:
    return TokenReply(
        request_id,
        token_ids=part.token_ids.tobytes(),
        logprobs=part.logprobs.tobytes(),
        finish_reason=finish_reason,
        versions=part.versions,
        timing=timing,
    )


def _timing_of_final(output: RequestOutput) -> ServerTiming | None:
    stats = output.metrics
    if not isinstance(stats, RequestStateStats):
        return None
    return timing_of(stats, output.num_cached_tokens or 0)


def _part_of_final(output: RequestOutput, start: int) -> Part:
    choice = output.outputs[0]
    logprobs = choice.logprobs
    columns: list[float] = [] if logprobs is None else _sampled(logprobs)
    spans = choice.weight_versions or ()
    return Part(
        array("i", choice.token_ids[start:]),
        array("f", columns[start:]),
        tuple(VersionSpan(span.version, span.start) for span in spans),
    )


def _sampled(logprobs: Any) -> list[float]:
    """Return the log-prob of each sampled token: the first entry of each position."""
    return [logprobs.logprobs[start] for start in logprobs.start_indices]
