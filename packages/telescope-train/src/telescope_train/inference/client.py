"""Token-in token-out requests to one vLLM server, and the control calls of a weight update."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Literal, cast
from uuid import uuid4

import aiohttp
import msgspec
import orjson

from telescope_core.base.errors import EndpointError
from telescope_core.base.types import Sampling, Span, WeightVersion
from telescope_train.inference.generation import (
    Generation,
    Request,
    RequestAbortedError,
    ServerLostError,
    ended,
    joined,
    sampling_after,
)
from telescope_train.inference.servers import (
    ALIVE_WITHIN_S,
    ANSWER_WITHIN_S,
    CONTROL_DEADLINE_S,
    ServerLoad,
    parse_load,
)
from telescope_train.inference.wire import (
    ENGINE_PATH,
    MAX_FRAME_BYTES,
    ONCE_HEADER,
    OTHER_SERVER_STATUS,
    TOKEN_PLANE_PATH,
    CancelRequest,
    Outbox,
    ServerFrame,
    TokenReply,
    TokenRequest,
    column,
    root_of,
    secret_headers,
)

_LOAD_S = 5.0
RECENT_S = 0.9
"""Seconds for which a page of metrics says how busy a server is: it takes the server some of the
time in which it could sample, and whoever reads meters asks for it every second."""
_PAUSES_S = (0.25, 0.5, 1.0)
"""Seconds to wait before each further attempt at a control call."""
_JSON = {"content-type": "application/json"}
_ENCODER = msgspec.msgpack.Encoder()


class TokenClient:
    """The connections to one server: the token plane, and HTTP for control calls.

    Canceling a call aborts its request on the server.
    """

    def __init__(
        self,
        base_url: str,
        *,
        identity: str = "",
        secret: str = "",
        answer_within_s: float = ANSWER_WITHIN_S,
        expects_routes: bool = False,
    ) -> None:
        """A control call with a deadline is repeated after `answer_within_s` seconds.

        `identity`: identity of the server's present life, to which all requests are addressed;
        empty means any server at this address. `secret`: the secret that the server requires; empty
        means none. `expects_routes`: an answer without its routing to experts is an error.
        """
        self.base_url = base_url
        self.identity = identity
        self._answer_within_s = answer_within_s
        self._expects_routes = expects_routes
        self.num_in_flight = 0
        self.heard_s = 0.0
        self._page: tuple[float, str] | None = None
        """The newest page of metrics, and the time of its arrival."""
        # Each control call opens its own connection. vLLM closes a connection that has been idle
        # for 5 s, and between two steps it may do so at the moment the next call goes out.
        # There is no total timeout, because a generation may take as long as its rollout: the
        # rollout's own deadline cancels it, and a server that dies closes the socket. Connecting
        # has a timeout, because a host that is gone does not even refuse.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            headers=secret_headers(secret),
        )
        self._plane: Plane | None = None
        self._opening = asyncio.Lock()
        self._calling = dict[asyncio.Timeout, str]()
        """The open control calls: what ends each, and why it was ended."""

    async def generate(self, request: Request) -> Generation:
        """Sample the rest of `request`; raises ServerLostError if the server is gone."""
        if (whole := ended(request)) is not None:
            return whole
        prompt_ids, begun = request.prompt_ids, request.begun
        # Counted before anything is awaited: `ServerPool` compares these counts for each group.
        self.num_in_flight += 1
        try:
            # After `_open_plane` nothing is awaited until `request` waits for its reply, so the
            # plane cannot be lost in between without this request being told.
            plane = await self._open_plane()
            sampling = sampling_after(begun, request.sampling)
            reply = await plane.request(
                prompt_ids if begun is None else array("i", prompt_ids) + begun.token_ids,
                sampling=encoded_params(sampling, request.stop_token_ids),
                cache_salt=request.cache_salt,
                priority=request.priority,
                traceparent=request.watching.traceparent,
            )
        except (ServerLostError, RequestAbortedError) as error:
            if begun is not None:
                error.begun = begun if error.begun is None else joined(begun, error.begun)
            raise
        finally:
            self.num_in_flight -= 1
        generation = parse_reply(reply, self.base_url)
        if self._expects_routes and generation.routes is None:
            raise EndpointError(
                f"{self.base_url} did not say which experts computed a request, and routing_replay "
                "needs that; start servers through Telescope, with the vLLM release it names"
            )
        return joined(begun, generation)

    async def control(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
        deadline_s: float | None = CONTROL_DEADLINE_S,
    ) -> Any:
        """Return the answer of an administrative route; raises EndpointError if there is none.

        A call without an answer is repeated a few times. If two calls have another effect than one
        (not `is_repeatable`), the server runs the call once and repeats its answer.

        `deadline_s`: longest that all of this may take; None = until the server is dropped.
        """
        headers = _JSON if is_repeatable else _JSON | {ONCE_HEADER: uuid4().hex}
        limit = asyncio.timeout(deadline_s)
        self._calling[limit] = f"did not answer within {deadline_s or 0:g} s"
        try:
            async with limit:
                within_s = None if deadline_s is None else self._answer_within_s
                return await self._post_again(f"{path}{query}", body or {}, headers, within_s)
        except TimeoutError:
            raise ServerLostError(f"{self.base_url}{path} {self._calling[limit]}") from None
        finally:
            del self._calling[limit]

    async def is_alive(self, *, within_s: float = ALIVE_WITHIN_S) -> bool:
        """Return whether the server's engine shows a sign of life within that many seconds."""
        url = f"{self._root}{ENGINE_PATH}"
        try:
            async with asyncio.timeout(within_s), self._session.get(url) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def load(self) -> ServerLoad | None:
        """Return the load of the server; None if it does not report it within a few seconds.

        Uses a metrics page that was read very recently, if there is one.
        """
        read_s, page = self._page or (0.0, None)
        if page is None or asyncio.get_running_loop().time() - read_s >= RECENT_S:
            page = await self.metrics_page()
        return None if page is None else parse_load(page)

    async def metrics_page(self) -> str | None:
        """Return the server's Prometheus text; None if it does not arrive within a few seconds."""
        url = f"{self._root}/metrics"
        try:
            async with asyncio.timeout(_LOAD_S), self._session.get(url) as response:
                page = await response.text() if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError):
            # The requests of a lost server notice the loss themselves.
            page = None
        self._page = None if page is None else (asyncio.get_running_loop().time(), page)
        return page

    async def drop(self, why: str) -> None:
        """Fail all requests and control calls in flight; later ones connect again.

        They end with ServerLostError. This is needed because a lost machine sends nothing, so a
        call without a deadline would stay open until the run ends.
        """
        now_s = asyncio.get_running_loop().time()
        for limit in self._calling:
            if not limit.expired():
                self._calling[limit] = f"was given up: {why}"
                limit.reschedule(now_s)
        if self._plane is not None:
            await self._plane.close(why)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._plane is not None:
            await self._plane.close()
        await self._session.close()

    @property
    def _root(self) -> str:
        return root_of(self.base_url, self.identity)

    async def _open_plane(self) -> "Plane":
        """Return the token plane, and open it again if it was lost."""
        if self._plane is not None and self._plane.is_open:
            return self._plane
        # Many rollouts ask at once. The first one opens the connection while the others wait for
        # the lock, and then they find it open.
        async with self._opening:
            if self._plane is None or not self._plane.is_open:
                if self._plane is not None:
                    # Its socket and tasks would stay open for as long as the run lasts.
                    await self._plane.close()
                url = f"{self._root}{TOKEN_PLANE_PATH}"
                try:
                    # Compression is off: token ids shrink too little to pay for it on a fast link.
                    # A server that hangs takes the connection and says nothing more.
                    async with asyncio.timeout(CONTROL_DEADLINE_S):
                        socket = await self._session.ws_connect(
                            url, max_msg_size=MAX_FRAME_BYTES, compress=0
                        )
                except (TimeoutError, aiohttp.ClientError) as error:
                    if getattr(error, "status", None) == 403:
                        why = "it refuses with HTTP 403 who means that one, or has another secret"
                        raise _is_another(self.base_url, why) from None
                    raise _no_answer(url, error) from error
                self._plane = Plane(socket, url, on_frame=self._hear)
            return self._plane

    def _hear(self) -> None:
        self.heard_s = asyncio.get_running_loop().time()

    async def _post_again(
        self, path: str, body: dict[str, Any], headers: dict[str, str], within_s: float | None
    ) -> Any:
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                async with asyncio.timeout(within_s):
                    return await self._post(path, body, headers)
            except aiohttp.ClientError as error:
                pause_s = next(pauses_s, None)
                if pause_s is None:
                    raise _no_answer(f"{self.base_url}{path}", error) from error
                await asyncio.sleep(pause_s)
            except TimeoutError:
                continue  # until the deadline of the call

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        url, data = f"{self._root}{path}", orjson.dumps(body)
        async with self._session.post(url, data=data, headers=headers) as response:
            content = await response.read()
        if response.status == OTHER_SERVER_STATUS:
            raise _is_another(self.base_url, content.decode(errors="replace")[:500])
        if response.status != 200:
            text = content.decode(errors="replace")[:500]
            raise EndpointError(f"{self.base_url}{path} answered HTTP {response.status}: {text}")
        return orjson.loads(content) if response.content_type == "application/json" else None


class _Waiting:
    """A request, and the part of its answer that has arrived."""

    def __init__(self) -> None:
        self.future: asyncio.Future[TokenReply] = asyncio.get_running_loop().create_future()
        self._so_far: TokenReply | None = None

    def take(self, reply: TokenReply) -> None:
        """Add a reply; the last one ends the request."""
        if self.future.done():
            return  # it is canceled, and about to be removed
        if self._so_far is not None and not reply.error:
            reply = msgspec.structs.replace(
                reply,
                token_ids=self._so_far.token_ids + reply.token_ids,
                logprobs=self._so_far.logprobs + reply.logprobs,
            )
        if not reply.is_last:
            self._so_far = reply
        elif reply.is_dead:
            self.lose(f"the engine of an inference server is dead: {reply.error}")
        elif reply.finish_reason == "abort":
            begun = _generation(reply, "length") if reply.token_ids else None
            self.future.set_exception(RequestAbortedError("the server aborted the request", begun))
        else:
            self.future.set_result(reply)

    def lose(self, why: str) -> None:
        """Fail the request, with the part of its answer that has arrived."""
        if not self.future.done():
            begun = None if self._so_far is None else _generation(self._so_far, "length")
            self.future.set_exception(ServerLostError(why, begun))


class Plane:
    """One open WebSocket. Replies are matched to requests by number."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        url: str,
        *,
        on_frame: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_frame` is called for each frame that arrives."""
        self._socket = socket
        self._on_frame = on_frame
        self._url = url
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = count()
        self._outbox = Outbox[TokenRequest | CancelRequest](self._send)
        self._decoder = msgspec.msgpack.Decoder(ServerFrame)
        # One task writes and one reads. aiohttp refuses a second `receive` while one is waiting,
        # and a single writer can put whatever has gathered into one frame.
        self._tasks = [
            asyncio.create_task(self._outbox.run()),
            asyncio.create_task(self._read()),
        ]

    @property
    def is_open(self) -> bool:
        """Whether requests can be made."""
        return not self._socket.closed and not any(task.done() for task in self._tasks)

    async def request(
        self,
        prompt_ids: Sequence[int],
        *,
        sampling: msgspec.Raw,
        cache_salt: str,
        priority: int,
        traceparent: str = "",
    ) -> TokenReply:
        """Send one request and wait for its reply; raises ServerLostError if the plane is lost."""
        number = next(self._numbers)
        ids = array("i", prompt_ids).tobytes()
        request = TokenRequest(
            number,
            ids,
            sampling,
            cache_salt=cache_salt,
            priority=priority,
            traceparent=traceparent,
        )
        if request.num_bytes > MAX_FRAME_BYTES:
            raise EndpointError(
                f"a prompt of {len(prompt_ids)} tokens does not fit into one message to "
                f"{self._url}, which holds {MAX_FRAME_BYTES} bytes; expected a shorter prompt"
            )
        waiting = self._waiting[number] = _Waiting()
        self._outbox.put(request)
        try:
            return await waiting.future
        except asyncio.CancelledError:
            # Only queued: awaiting the send would delay the cancellation. If the connection is
            # lost first, the server aborts all of its requests anyway.
            self._outbox.put(CancelRequest(number))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self, why: str = "it was closed") -> None:
        """Close the connection; requests that still wait for a reply fail."""
        self._fail(why)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()

    async def _send(self, items: list[TokenRequest | CancelRequest]) -> None:
        try:
            await self._socket.send_bytes(_ENCODER.encode(items))
        except (aiohttp.ClientError, ConnectionError) as error:
            # The reader may notice the broken connection much later, so the callers are woken
            # here. Raising ends the writer's task, after which `is_open` is false.
            self._fail(f"{type(error).__name__}: {error}")
            raise

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    # aiohttp hands out its own errors this way, such as a frame above the limit.
                    self._fail(f"it sent a {message.type.name} message ({message.data})")
                    return
                self._on_frame()
                for reply in self._decoder.decode(message.data):
                    # A reply may cross a cancellation on its way.
                    waiting = self._waiting.get(reply.id)
                    if waiting is not None:
                        waiting.take(reply)
        except msgspec.MsgspecError as error:
            self._fail(f"it sent a malformed frame ({error})")
        finally:
            # Without a reader no reply can arrive any more, so no caller may go on waiting.
            self._fail(f"the connection closed ({self._socket.close_code})")

    def _fail(self, why: str) -> None:
        for waiting in self._waiting.values():
            waiting.lose(f"lost the inference server {self._url}: {why}")


def _no_answer(url: str, error: Exception) -> ServerLostError:
    return ServerLostError(
        f"no answer from the inference server at {url}: {type(error).__name__}: {error}"
    )


def _is_another(base_url: str, why: str) -> ServerLostError:
    return ServerLostError(
        f"another inference server than the one that is meant answers at {base_url}: {why}"
    )


def encoded_params(sampling: Sampling, stop_token_ids: Sequence[int]) -> msgspec.Raw:
    """Return `sampling` as vLLM's parameters, with log-probs of the sampled tokens."""
    params = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "stop_token_ids": list(stop_token_ids),
        # Only stop strings are matched in text; detokenizing costs the server time.
        "detokenize": bool(sampling.stop),
        # 0 alternatives: vLLM then returns the sampled token's log-prob alone.
        "logprobs": 0,
    }
    return msgspec.Raw(_ENCODER.encode(params))


def parse_reply(reply: TokenReply, base_url: str) -> Generation:
    """Read one reply; raises EndpointError if the request failed or a log-prob is missing."""
    if reply.error:
        raise EndpointError(f"{base_url} refused a request: {reply.error}")
    if reply.finish_reason not in ("stop", "length"):
        raise EndpointError(
            f"{base_url} ended a request with finish_reason {reply.finish_reason!r}; "
            "expected 'stop' or 'length'"
        )
    num_tokens, num_logprobs = len(reply.token_ids) // 4, len(reply.logprobs) // 4
    if num_logprobs != num_tokens or not num_tokens:
        raise EndpointError(
            f"{base_url} returned {num_tokens} tokens with {num_logprobs} log-probs; "
            "one log-prob per token was expected"
        )
    if not reply.versions:
        raise EndpointError(
            f"{base_url} did not say which weights sampled a request; expected at least one "
            "version span. Start servers through Telescope, with the vLLM release it names"
        )
    return _generation(reply, cast(Literal["stop", "length"], reply.finish_reason))


def _generation(reply: TokenReply, finish_reason: Literal["stop", "length"]) -> Generation:
    token_ids = cast("array[int]", column("i", reply.token_ids))
    return Generation(
        token_ids=token_ids,
        logprobs=cast("array[float]", column("f", reply.logprobs)),
        finish_reason=finish_reason,
        spans=_spans(reply, len(token_ids)),
        routes=reply.routes,
        timing=reply.timing,
    )


def _spans(reply: TokenReply, num_tokens: int) -> tuple[Span, ...]:
    starts = [span.start for span in reply.versions]
    return tuple(
        Span(parse_version(span.version), end - start)
        for span, start, end in zip(reply.versions, starts, [*starts[1:], num_tokens], strict=True)
    )


def parse_version(text: str) -> WeightVersion:
    """Return the version that a server reports: `default` before the first update."""
    return 0 if text == "default" else int(text)
