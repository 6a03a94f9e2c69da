"""`Gateway`: routes each request to the policy of its rollout, by a `Session` of that rollout.

The path contains the name of a rollout, which cannot be guessed. Each rollout has its own API key.
"""

import asyncio
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hmac import compare_digest
from typing import Protocol, cast
from weakref import WeakValueDictionary

from aiohttp import web

from telescope_core.base.addresses import reached_directly
from telescope_core.base.types import ChatEndpoint, Completion, Sampling
from telescope_core.gateway.anthropic_reply import message_events, message_json
from telescope_core.gateway.anthropic_request import read_anthropic
from telescope_core.gateway.listener import (
    ChatServer,
    answer_chat,
    answer_events,
    answer_json,
    read_chat,
)
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import OLDER_VERSION, ChatRequest, read_request
from telescope_core.gateway.responses_reply import response_events, response_json
from telescope_core.gateway.responses_request import MAX_KEPT, read_responses


class Answering(Protocol):
    """Answers the requests that arrive at one endpoint."""

    async def answer(self, request: ChatRequest) -> Completion:
        """Answer `request`; cancelling the caller cancels it."""
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`; raises Refusal."""
        ...


class Session:
    """Passes the requests at one endpoint to one policy.

    The policy holds its session, and the session refers to the policy only weakly. The endpoint of
    a policy that is no longer used therefore disappears with it.
    """

    def __init__(
        self,
        policy: Answering,
        sampling: Sampling,
        endpoint: ChatEndpoint,
        *,
        has_older: bool = False,
    ) -> None:
        """`has_older`: whether the policy also answers requests that name `OLDER_VERSION`."""
        self._policy = weakref.ref(policy)
        self._asking: set[asyncio.Task[Completion]] = set()
        self.sampling = sampling
        """The values of all parameters that a request leaves out."""
        self.endpoint = endpoint
        self.has_older = has_older
        self.is_open = True
        self.responses: dict[str, tuple[object, ...]] = {}
        """Id of an answer in the Responses API -> the items up to it and its own; the latest."""
        self.refusal = ""
        """Why a request was refused, the last one; empty = none was."""

    async def complete(self, request: ChatRequest) -> Completion:
        """Answer `request`; canceling the caller frees the server's slot, and so does `end`.

        Raises Refusal if the rollout has ended, before or during the request.
        """
        policy = self._policy()
        if policy is None or not self.is_open:
            raise ended()
        # A task of its own, because `end` has to cancel the request without canceling the HTTP
        # handler that waits for it: the handler still has to tell the client why.
        task = asyncio.get_running_loop().create_task(policy.answer(request))
        self._asking.add(task)
        try:
            completion = await task
        except asyncio.CancelledError:
            # Two causes look the same here. If the client went away, the handler itself is being
            # canceled, which must go on. If only the task was canceled, the rollout has ended.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ended() from None
        finally:
            self._asking.discard(task)
        said = completion.message
        if request.takes_one_call and len(said.tool_calls) > 1:
            # The whole answer was sampled and is recorded. A program that sends back its first call
            # alone begins a new sample with that.
            first = replace(said, tool_calls=said.tool_calls[:1])
            completion = replace(completion, message=first)
        return completion

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`; raises Refusal."""
        policy = self._policy()
        if policy is None or not self.is_open:
            raise ended()
        return await policy.count_tokens(request)

    def end(self) -> None:
        """Cancel the requests in progress and accept no more. Idempotent."""
        # First, so that a handler that runs before the cancellations take effect starts nothing.
        self.is_open = False
        for task in self._asking:
            task.cancel()


def ended() -> Refusal:
    """Build the answer to requests for a rollout that has ended or never existed."""
    return Refusal(
        "no rollout is being played at this address: it has ended, or the address is wrong; use "
        "episode.endpoint of the present rollout, and let a program end with its rollout",
        code="rollout_not_found",
        status=404,
    )


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
        """`port` 0 = a free one; `read` parses requests, by default those to answer exactly."""
        self._model = model
        self._read = read
        # Weak, because an environment that fails may never close its policy. With the policy its
        # session goes too, and the gateway does not grow over a long run.
        self._sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()
        base = "/rollouts/{rollout}/v1"
        self._server = ChatServer(
            [
                ("POST", f"{base}/chat/completions", self._chat),
                ("POST", f"{base}/responses", self._respond),
                ("POST", f"{base}/messages", self._message),
                ("POST", f"{base}/messages/count_tokens", self._count_tokens),
                ("GET", f"{base}/models", self._models),
                ("GET", f"{base}/models/{{model}}", self._one_model),
            ],
            host=host,
            port=port,
            on_refusal=self._is_refused,
        )

    async def start(self) -> None:
        """Begin to listen; raises ConfigError if the address is not available."""
        # Clients of agents in this process and in those that it starts follow its variables.
        os.environ.update(reached_directly(os.environ))
        await self._server.start()

    def open(self, policy: Answering, sampling: Sampling, *, has_older: bool = False) -> Session:
        """Give `policy` an endpoint of its own; returns its session, which the policy must keep.

        `has_older`: whether it also answers requests that name `OLDER_VERSION`.
        """
        name = secrets.token_urlsafe(12)
        endpoint = ChatEndpoint(
            base_url=f"{self._server.address}/rollouts/{name}/v1",
            api_key=secrets.token_urlsafe(24),
            model=self._model,
        )
        session = Session(policy, sampling, endpoint, has_older=has_older)
        self._sessions[name] = session
        return session

    async def close(self) -> None:
        """End all requests in progress and stop listening. Idempotent."""
        # Requests end first, so that their handlers answer and the server need not wait for them.
        for session in list(self._sessions.values()):
            session.end()
        await self._server.close()

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)

        def read(body: object) -> ChatRequest:
            named = cast(dict[str, object], body).get("model") if isinstance(body, dict) else None
            is_older = session.has_older and named == OLDER_VERSION
            model = OLDER_VERSION if is_older else self._model
            return self._read(body, session.sampling, model=model)

        asked = await read_chat(request, read)
        completion = await session.complete(asked)
        return answer_chat(completion, asked, model=asked.model or self._model)

    async def _respond(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = await self._asked(session, request, partial(read_responses, kept=session.responses))
        answer = response_json(await session.complete(asked), model=self._model)
        if asked.items:
            session.responses[answer["id"]] = (*asked.items, *answer["output"])
            if len(session.responses) > MAX_KEPT:
                session.responses.pop(next(iter(session.responses)))
        return answer_events(response_events(answer)) if asked.stream else answer_json(answer)

    async def _message(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = await self._asked(session, request, read_anthropic)
        completion = await session.complete(asked)
        if asked.stream:
            return answer_events(message_events(completion, model=self._model))
        return answer_json(message_json(completion, model=self._model))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = await self._asked(session, request, read_anthropic)
        return answer_json({"input_tokens": await session.count_tokens(asked)})

    async def _asked(
        self,
        session: Session,
        request: web.Request,
        read: Callable[[object, Callable[[object], ChatRequest]], ChatRequest],
    ) -> ChatRequest:
        """Return the chat request that is equivalent to a request of another API."""

        def read_as_chat(body: object) -> ChatRequest:
            return read(body, lambda chat: self._read(chat, session.sampling, model=self._model))

        return await read_chat(request, read_as_chat)

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        ends = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return answer_json({"object": "list", "data": [self._about_model()], **ends})

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
        return answer_json(self._about_model())

    def _about_model(self) -> dict[str, object]:
        """Return the model in a form that OpenAI's and Anthropic's clients can read."""
        of_openai = {"object": "model", "created": 0, "owned_by": "telescope"}
        of_anthropic = {
            "type": "model",
            "display_name": self._model,
            "created_at": "1970-01-01T00:00:00Z",
        }
        return {"id": self._model, **of_openai, **of_anthropic}

    def _is_refused(self, request: web.Request, refusal: Refusal) -> None:
        """Keep the reason for a program that does not tell it."""
        session = self._sessions.get(request.path.removeprefix("/rollouts/").partition("/")[0])
        # Programs count tokens where they can, and go on where they cannot.
        is_asking = refusal.status < 500 and not request.path.endswith("/count_tokens")
        if session is not None and session.is_open and is_asking:
            session.refusal = refusal.message

    def _session(self, request: web.Request) -> Session:
        # A rollout that ended and one that never was get the same answer, so the answer does not
        # show which names exist.
        session = self._sessions.get(request.match_info["rollout"])
        if session is None or not session.is_open:
            raise ended()
        given = request.headers.get("Authorization") or request.headers.get("x-api-key", "")
        scheme, space, key = given.partition(" ")
        if space and scheme.lower() == "bearer":
            given = key
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
