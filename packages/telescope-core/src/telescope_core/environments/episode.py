"""`Episode`: the state of one rollout while it is played."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from telescope_core.environments.hooks import EpisodeStopped
from telescope_core.errors import EndpointError
from telescope_core.protocols import Policy
from telescope_core.types import (
    ChatEndpoint,
    Completion,
    Example,
    JsonValue,
    Message,
    Sampling,
    Turn,
    TurnInfo,
)


class Episode:
    """One rollout in progress: the conversation so far, and access to the policy.

    An environment reads `messages`, asks the policy for a turn with `generate`, and replies with
    `add`. `example` is the example that is played. `turns` holds the model calls so far. `state`
    is a dict for the environment's own use and is new for each rollout. `metrics`, `tags` and the
    values kept with `note` are recorded with the rollout.
    """

    def __init__(
        self, example: Example, messages: Sequence[Message], *, policy: Policy, sampling: Sampling
    ) -> None:
        self.example = example
        self.messages = list(messages)
        self.num_opening_messages = len(self.messages)
        self.turns: list[Turn] = []
        self.state: dict[str, object] = {}
        self.metrics: dict[str, float] = {}
        self.tags: dict[str, str] = {}
        self.tools: Sequence[dict[str, JsonValue]] = ()
        """Tools in OpenAI form for every turn, unless `generate` is given others."""
        self.info: list[TurnInfo] = []
        self.find_stop: Callable[[Episode], Awaitable[str | None]] | None = None
        """Returns the name of the `@stop` method that ends the rollout, or None."""
        self._policy = policy
        self._sampling = sampling

    @property
    def sampling(self) -> Sampling:
        """How this rollout is sampled. In training, `endpoint` applies it by itself."""
        return self._sampling

    @property
    def endpoint(self) -> ChatEndpoint:
        """The policy's endpoint, for a program that uses its own client.

        Raises EndpointError when the policy has no server, such as a scripted policy.
        """
        endpoint = self._policy.endpoint
        if endpoint is None:
            raise EndpointError(
                f"this policy ({type(self._policy).__name__}) has no chat endpoint; run an eval "
                "against a served model, or training, or use episode.generate instead"
            )
        return endpoint

    async def generate(self, *, tools: Sequence[dict[str, JsonValue]] | None = None) -> Completion:
        """Ask the policy for the next assistant message, and append it to `messages`.

        `@stop` methods are checked before the model call, except in the first turn, so that they
        see the environment's reply to the turn before. They are checked again after the call
        unless `max_tokens` cut the turn.
        """
        if self.turns:
            await self._require_going_on()
        started_s = time.monotonic()
        completion = await self._policy.complete(
            self.messages, self._sampling, tools=self.tools if tools is None else tools
        )
        self.turns.append(
            Turn(completion=completion, started_s=started_s, ended_s=time.monotonic())
        )
        self.messages.append(completion.message)
        if completion.finish_reason != "length":
            await self._require_going_on()
        return completion

    def add(self, *messages: Message) -> None:
        """Append messages from the environment to the conversation."""
        self.messages.extend(messages)

    def note(
        self,
        key: str,
        value: str,
        *,
        kind: Literal["text", "code", "stdout", "stderr"] = "text",
    ) -> None:
        """Record `value` under `key` with the latest turn; `kind` decides how it is shown."""
        turn = max(0, len(self.turns) - 1)
        self.info.append(TurnInfo(turn=turn, key=key, value=value, kind=kind))

    async def _require_going_on(self) -> None:
        reason = await self.find_stop(self) if self.find_stop is not None else None
        if reason is not None:
            self.tags["stopped_by"] = reason
            raise EpisodeStopped(reason)
