"""`RecordingPolicy`: a policy that records each of its answers itself.

`ForwardingPolicies` gives each rollout of an eval such a policy, with its own endpoint in front of
the evaluated one. The token-exact policy of training is another such policy.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager

from telescope_core.base.attempts import is_too_long
from telescope_core.base.errors import EndpointError
from telescope_core.base.types import ChatEndpoint, Completion, JsonValue, Message, Sampling, Turn
from telescope_core.chat.client import ChatClient
from telescope_core.chat.trouble import Watch, watching
from telescope_core.gateway.forwarded import read_forwarded
from telescope_core.gateway.recorder import Recorder
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import ChatRequest
from telescope_core.gateway.server import Gateway
from telescope_core.gateway.session import Session


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
