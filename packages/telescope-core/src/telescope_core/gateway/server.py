"""`Gateway`: the HTTP server. It finds the rollout of a request and answers in OpenAI's format.

The path contains the name of a rollout, which cannot be guessed. Each rollout has its own API key.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from weakref import WeakValueDictionary

import msgspec
from aiohttp import web

from telescope_core.addresses import in_url
from telescope_core.attempts import says_too_long
from telescope_core.errors import (
    ConfigError,
    ContextLengthError,
    EndpointAccessError,
    EndpointError,
)
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.reply import event_stream, reply_json
from telescope_core.gateway.request import ChatRequest, read_request
from telescope_core.gateway.session import Answering, Session, ended
from telescope_core.types import ChatEndpoint, Sampling

# aiohttp's own limit is 1 MiB, which the history of a long agent run can exceed.
MAX_REQUEST_BYTES = 64 * 2**20
"""Largest body of a request."""
MAX_SECONDS_IDLE = 60.0
"""Seconds without a request after which a connection is closed, and those that a body may take."""
_LOOK_EVERY_S = 5.0
_MOST_READ_AT_ONCE_BYTES = 2**18
"""A larger request is read in a thread, because the event loop plays every other rollout."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Serves any number of rollouts on one port. It belongs to the event loop that started it.

    A proxy or a log may show the path of a request, so the path alone gives no access.
    """

    def __init__(
        self,
        *,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        read: Callable[..., ChatRequest] = read_request,
    ) -> None:
        """`port` 0 = a free one; `read` reads requests, by default those to answer exactly."""
        self._model = model
        self._read = read
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        # Weak, because an environment that fails may never close its policy. With the policy its
        # session goes too, and the gateway does not grow over a long run.
        self._sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._has_asked: set[object] = set()
        """Connections that a whole request has come over."""
        self._closing_idle: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen; raises ConfigError if the address is not available."""
        app = web.Application(
            middlewares=[self._note_connection, _as_openai_errors],
            client_max_size=MAX_REQUEST_BYTES,
        )
        app.router.add_post("/rollouts/{rollout}/v1/chat/completions", self._chat)
        app.router.add_get("/rollouts/{rollout}/v1/models", self._models)
        app.router.add_get("/rollouts/{rollout}/v1/models/{model}", self._one_model)
        app.router.add_route("*", "/{anything:.*}", _elsewhere)
        # By default aiohttp lets a handler go on after its client has gone away, and the server
        # would sample for nobody. Canceling the handler also cancels its request to the server.
        # By default it also waits up to 60 s for handlers in progress when it shuts down. `close`
        # has ended their sessions by then, so they need no time.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=MAX_SECONDS_IDLE,
            # What a client still sends after it was refused is not read.
            lingering_time=0.0,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise ConfigError(
                f"the gateway cannot listen on {in_url(self._host)}:{self._port} "
                f"({error.strerror}); set "
                "gateway_host to an address of this machine, and gateway_port to a free port or 0"
            ) from None
        # Port 0 makes the operating system choose one, which is known only now.
        self._port = self._runner.addresses[0][1]
        self._closing_idle = asyncio.create_task(self._close_idle(self._runner))

    def open(self, policy: Answering, sampling: Sampling) -> Session:
        """Give `policy` an endpoint of its own; the policy must hold the session it gets."""
        name = secrets.token_urlsafe(12)
        endpoint = ChatEndpoint(
            base_url=f"http://{in_url(self._host)}:{self._port}/rollouts/{name}/v1",
            api_key=secrets.token_urlsafe(24),
            model=self._model,
        )
        session = Session(policy, sampling, endpoint)
        self._sessions[name] = session
        return session

    async def close(self) -> None:
        """End all requests in progress and stop listening. Idempotent."""
        # Requests end first, so that their handlers answer and the server need not wait for them.
        for session in list(self._sessions.values()):
            session.end()
        if self._closing_idle is not None:
            self._closing_idle.cancel()
            self._closing_idle = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _note_connection(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        self._has_asked.add(request.protocol)
        return await handler(request)

    async def _close_idle(self, runner: web.AppRunner) -> None:
        """Close connections over which no request has come for a while; never returns.

        Those that have had one are closed by the server, which does not look at the others.
        """
        opened_s: dict[web.RequestHandler, float] = {}
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            assert runner.server is not None, "the server listens"
            now_s, connections = asyncio.get_running_loop().time(), runner.server.connections
            opened_s = {one: opened_s.get(one, now_s) for one in connections}
            self._has_asked.intersection_update(connections)
            for one, since_s in opened_s.items():
                if now_s - since_s > MAX_SECONDS_IDLE and one not in self._has_asked:
                    one.force_close()

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = await self._asked(request, session)
        completion = await session.complete(asked)
        # Tokens arrive all at once when the turn is complete, so a stream is sent as one body.
        if asked.stream:
            events = event_stream(completion, model=self._model, include_usage=asked.include_usage)
            return web.Response(body=events, content_type="text/event-stream")
        return _answer(reply_json(completion, model=self._model))

    async def _asked(self, request: web.Request, session: Session) -> ChatRequest:
        body = await _body(request)

        def read() -> ChatRequest:
            try:
                return self._read(_json(body), session.sampling, model=self._model)
            except RecursionError:
                raise Refusal("the request is nested too deep", code="invalid_json") from None

        if len(body) > _MOST_READ_AT_ONCE_BYTES:
            return await asyncio.to_thread(read)
        return read()

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return _answer({"object": "list", "data": [self._about_model()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info["model"]
        if name != self._model:
            raise Refusal(
                f"there is no model {name!r} here, only {self._model!r}",
                param="model",
                code="model_not_found",
                status=404,
            )
        return _answer(self._about_model())

    def _about_model(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "telescope"}

    def _session(self, request: web.Request) -> Session:
        # A rollout that ended and one that never was get the same answer, so the answer does not
        # show which names exist.
        session = self._sessions.get(request.match_info["rollout"])
        if session is None or not session.is_open:
            raise ended()
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # Takes the same time for every wrong key, so a key cannot be guessed byte by byte.
        # A header may hold bytes that are no text.
        if not compare_digest(
            given.encode(errors="surrogateescape"), session.endpoint.api_key.encode()
        ):
            raise Refusal(
                "the API key is not that of the rollout in the base URL; give the client both "
                "base_url and api_key of episode.endpoint",
                code="invalid_api_key",
                status=401,
            )
        return session


async def _body(request: web.Request) -> bytes:
    if (request.content_length or 0) > MAX_REQUEST_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(MAX_SECONDS_IDLE):
            return await request.read()
    except TimeoutError:
        raise Refusal(
            f"the request did not come within {MAX_SECONDS_IDLE:g} s",
            code="request_timeout",
            status=408,
        ) from None


def _too_large() -> Refusal:
    text = f"the request is larger than {MAX_REQUEST_BYTES // 2**20} MiB"
    return Refusal(text, code="request_too_large", status=413)


def _json(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the request is not JSON: {error}", code="invalid_json") from None


async def _elsewhere(request: web.Request) -> web.StreamResponse:
    raise Refusal(
        f"there is no {request.method} {request.path.rpartition('/v1')[2] or '/'} here, only POST "
        "/chat/completions and GET /models behind the base_url of episode.endpoint; a program "
        "that uses another API of OpenAI (such as responses or completions) has to be told to "
        "use chat completions",
        code="unknown_url",
        status=404,
    )


@web.middleware
async def _as_openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        response = _refuse(refusal)
        if refusal.status in (408, 413):
            response.force_close()  # the rest of the body is not read
        return response
    # OpenAI's client tries again after a 502 but not after a 400. `ContextLengthError` comes before
    # its base class `ConfigError`, because clients know OpenAI's code for a full context.
    except ContextLengthError as error:
        return _refuse(Refusal(str(error), param="messages", code="context_length_exceeded"))
    except ConfigError as error:
        return _refuse(Refusal(str(error), param="messages", code="invalid_value"))
    except EndpointError as error:
        if error.is_of_request or isinstance(error, EndpointAccessError):
            return _refuse(_passed_on(error))
        return _refuse(Refusal(str(error), code="inference_server_failed", status=502))
    except web.HTTPRequestEntityTooLarge:
        return _refuse(_too_large())


def _passed_on(error: EndpointError) -> Refusal:
    """Build the answer to a program whose request another endpoint refused."""
    code = "context_length_exceeded" if says_too_long(error.answer) else "endpoint_refused"
    return Refusal(str(error), code=code, status=error.status or 400)


def _refuse(refusal: Refusal) -> web.Response:
    return _answer(refusal.as_json(), status=refusal.status)


def _answer(body: dict[str, object], *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )
