"""`RecordingPolicy`: a policy that records each of its answers itself, with a `Recorder`.

`ForwardingPolicies` gives each rollout of an eval such a policy, with its own endpoint in front of
the evaluated one. The token-exact policy of training is another such policy.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from telescope_core.base.agents import agent_of
from telescope_core.base.attempts import is_too_long
from telescope_core.base.errors import EndpointError, TelescopeError
from telescope_core.base.types import ChatEndpoint, Completion, JsonValue, Message, Sampling, Turn
from telescope_core.chat.client import ChatClient
from telescope_core.chat.sampling_fields import sampling_fields
from telescope_core.chat.trouble import Watch, watching
from telescope_core.gateway.messages import read_loosely
from telescope_core.gateway.refusal import Refusal, is_empty, unsupported
from telescope_core.gateway.request import (
    NEUTRAL,
    ChatRequest,
    flag,
    given_fields,
    include_usage,
    max_tokens_of,
)
from telescope_core.gateway.server import Gateway
from telescope_core.gateway.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageKey:
    """Identifies a message in a history that a program sends back."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...]
    tool_call_id: str | None


class Recorder:
    """The turns of one rollout, and the conversations that a program had at its endpoint.

    An environment asks with `episode.generate`; a program that it runs asks at the endpoint.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        """Every answer so far, in the order in which the answers ended."""
        self.leaves_out_thinking = False
        """Whether a program sent back a turn without the thinking that it had received with it."""
        self.was_asked = False
        """Whether there was any request."""
        self.is_out_of_context = False
        """Whether the latest request did not fit the model's context, though earlier ones did."""
        self._unanswered: dict[tuple[Message, ...], TelescopeError] = {}
        self._conversations: list[list[Message]] = []

    @property
    def failure(self) -> TelescopeError | None:
        """The error of a request that failed and did not succeed later; None = there is none."""
        return next(iter(self._unanswered.values()), None)

    @property
    def conversations(self) -> tuple[tuple[Message, ...], ...]:
        """Each conversation of the program that does not continue an earlier one."""
        return tuple(tuple(one) for one in self._conversations)

    def failed(self, asked: tuple[Message, ...], error: TelescopeError) -> None:
        """Record `error` until the same messages are answered.

        A program may ignore the error and continue, and its reward must then not count for the
        policy. A later turn that does not fit the context is no such error: it is a limit of the
        policy.
        """
        if self.turns and is_too_long(error):
            self.is_out_of_context = True
            return
        self._unanswered[asked] = error

    def answered(self, asked: tuple[Message, ...], turn: Turn) -> None:
        """Record the answer to `asked`."""
        self._unanswered.pop(asked, None)
        self.is_out_of_context = False
        self.turns.append(replace(turn, agent=agent_of(asked)))

    def heard(self, asked: Sequence[Message], completion: Completion) -> None:
        """Record a program's request at the endpoint, and its answer."""
        for said in self._conversations:
            if len(said) <= len(asked) and all(map(_is_same, said, asked)):
                self.leaves_out_thinking |= any(map(_lost_thinking, said, asked))
                said += (*asked[len(said) :], completion.message)
                return
        self._conversations.append([*asked, completion.message])


def _is_same(known: Message, sent: Message) -> bool:
    """Return whether a program sends back a message that it received, perhaps reformatted."""
    return known == sent or _key(known) == _key(sent)


def _key(message: Message) -> _MessageKey:
    return _MessageKey(
        role=message.role,
        content=message.content.strip(),
        calls=tuple((call.id, call.name) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _lost_thinking(known: Message, sent: Message) -> bool:
    return bool(known.reasoning) and not sent.reasoning


class RecordingPolicy(ABC):
    """One rollout's policy, with a record of its requests and answers."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.session: Session | None = None

    @property
    def turns(self) -> list[Turn]:
        """Every answer so far, in the order in which they ended."""
        return self.recorder.turns

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """Address of this policy at the gateway, for this rollout alone."""
        return self.session.endpoint if self.session is not None else None

    @property
    def trouble(self) -> str:
        """The error that the endpoint behind this policy returns; empty = none."""
        return ""

    def close(self) -> None:
        """End the endpoint and cancel the requests that are waiting there. Idempotent."""
        if self.session is not None:
            self.session.end()

    @abstractmethod
    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Answer the environment, and record it."""

    @abstractmethod
    async def answer(self, request: ChatRequest) -> Completion:
        """Answer a program at the endpoint, and record it with its conversation."""

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`; raises Refusal."""
        raise Refusal(
            "tokens are counted in training alone: the endpoint of an eval is not asked for it; "
            "let the program estimate them",
            code="unknown_url",
            status=404,
        )


@asynccontextmanager
async def forwarding(
    client: ChatClient, *, host: str = "127.0.0.1"
) -> AsyncGenerator["ForwardingPolicies", None]:
    """Start a gateway on `host` in front of the endpoint of `client`; yields policies for evals."""
    gateway = Gateway(model=await client.model(), host=host, read=read_forwarded)
    await gateway.start()
    try:
        yield ForwardingPolicies(client, gateway)
    finally:
        await gateway.close()


class ForwardingPolicies:
    """Gives each rollout of an eval a policy that passes its requests on to `client`."""

    def __init__(self, client: ChatClient, gateway: Gateway) -> None:
        self._client = client
        self._gateway = gateway

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "ForwardingPolicy":
        """Return the policy of one rollout; it has an endpoint only if `sampling` is given."""
        policy = ForwardingPolicy(self._client)
        if sampling is not None:
            policy.session = self._gateway.open(policy, sampling)
        return policy

    async def close(self) -> None:
        """Do nothing: the client and the gateway are closed by whoever opened them."""


class ForwardingPolicy(RecordingPolicy):
    """Passes requests on to a chat endpoint and records the answers."""

    def __init__(self, client: ChatClient) -> None:
        super().__init__()
        self._client = client
        self._waiting: list[Watch] = []

    @property
    def trouble(self) -> str:
        """The troubles of the requests that are waiting, or were cancelled while waiting."""
        return "; ".join(dict.fromkeys(watch.text for watch in self._waiting if watch.text))

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Ask the endpoint for a turn, on behalf of the environment."""
        asked = tuple(messages)
        return await self._recorded(
            asked, sampling, self._client.complete(asked, sampling, tools=tools)
        )

    async def answer(self, request: ChatRequest) -> Completion:
        """Pass the request of a program on as it is."""
        asked = request.messages
        completion = await self._recorded(
            asked, request.sampling, self._client.request(request.fields)
        )
        self.recorder.heard(asked, completion)
        return completion

    async def _recorded(
        self, asked: tuple[Message, ...], sampling: Sampling, asking: Awaitable[Completion]
    ) -> Completion:
        started_s = time.monotonic()
        self.recorder.was_asked = True
        with watching() as watch:
            self._waiting.append(watch)
            try:
                completion = await asking
            except EndpointError as error:
                self._waiting.remove(watch)
                # What the endpoint refuses of this one request is for the program to deal with,
                # such as by a shorter history.
                if not error.is_of_request or (self.turns and is_too_long(error)):
                    self.recorder.failed(asked, error)
                raise
            # One that is cancelled stays: its trouble may be why the deadline passed.
            self._waiting.remove(watch)
        turn = Turn(
            completion=completion,
            started_s=started_s,
            ended_s=time.monotonic(),
            temperature=sampling.temperature,
        )
        self.recorder.answered(asked, turn)
        return completion


UNRECORDED = ("n", "best_of", "functions", "function_call", "modalities", "audio")
"""Parameters that ask for something other than one message of text and calls."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_OUR_OWN = ("model", "stream", "stream_options")


def read_forwarded(body: object, own: Sampling, *, model: str) -> ChatRequest:
    """Read a request to a rollout whose sampling settings are `own`; raises Refusal."""
    given = given_fields(body, model=model)
    for name in UNRECORDED:
        changes_nothing, why = NEUTRAL[name]
        if name in given and not is_empty(given[name]) and not changes_nothing(given[name]):
            raise unsupported(name, why)
    stream = flag(given, "stream")
    options = include_usage(given.get("stream_options"), stream=stream)
    fields = _filled_in(given, own)
    temperature = fields.get("temperature")
    return ChatRequest(
        messages=read_loosely(given.get("messages")),
        sampling=replace(own, temperature=temperature, max_tokens=_limit(given, own)),
        stream=stream,
        include_usage=options,
        fields=fields,
    )


def _filled_in(given: Mapping[str, Any], own: Sampling) -> dict[str, Any]:
    passed = {name: value for name, value in given.items() if name not in (*_OUR_OWN, *_LIMITS)}
    fields = {**sampling_fields(own), **passed}
    # The name that the program used, which the endpoint may want; else that of the eval.
    limit = next((name for name in reversed(_LIMITS) if name in given), "max_tokens")
    fields.pop("max_tokens")
    return {**fields, limit: _limit(given, own)}


def _limit(given: Mapping[str, Any], own: Sampling) -> int:
    return min(own.max_tokens, max_tokens_of(given) or own.max_tokens)
