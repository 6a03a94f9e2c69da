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
    """One rollout in progress: the conversation so far, and the way to the policy.

    An environment reads `messages`, asks for a turn with `generate`, and answers with `add`.
    `state` is the environment's own, one per rollout; `metrics`, `tags` and what `note` keeps are
    recorded with the rollout.
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
        """Shown to the policy in every turn that does not name others."""
        self.info: list[TurnInfo] = []
        self.find_stop: Callable[[Episode], Awaitable[str | None]] | None = None
        """Returns the name of the `@stop` method that ends the rollout, if any."""
        self._policy = policy
        self._sampling = sampling

    @property
    def sampling(self) -> Sampling:
        """How this rollout is to be sampled. In training its endpoint does so by itself."""
        return self._sampling

    @property
    def endpoint(self) -> ChatEndpoint:
        """Where a program with a client of its own reaches the policy.

        Raises EndpointError where the policy is behind no server, such as a scripted one.
        """
        endpoint = self._policy.endpoint
        if endpoint is None:
            raise EndpointError(
                f"this policy ({type(self._policy).__name__}) has no chat endpoint; evaluate "
                "against a served model, train, or ask through episode.generate"
            )
        return endpoint

    async def generate(self, *, tools: Sequence[dict[str, JsonValue]] | None = None) -> Completion:
        """Ask the policy for the next assistant message and append it.

        `@stop` methods are asked before it, with the environment's answer to the turn before,
        and after it, unless the turn was cut by `max_tokens`.
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
        """Append what the environment says."""
        self.messages.extend(messages)

    def note(
        self,
        key: str,
        value: str,
        *,
        kind: Literal["text", "code", "stdout", "stderr"] = "text",
    ) -> None:
        """Keep `value` in the records, beside the turn that is the last one now."""
        turn = max(0, len(self.turns) - 1)
        self.info.append(TurnInfo(turn=turn, key=key, value=value, kind=kind))

    async def _require_going_on(self) -> None:
        reason = await self.find_stop(self) if self.find_stop is not None else None
        if reason is not None:
            self.tags["stopped_by"] = reason
            raise EpisodeStopped(reason)
