"""`Episode`: the state of one rollout while it is played."""

import time
from collections.abc import Sequence

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
)


class Episode:
    """One rollout in progress: the conversation so far, and the way to the policy.

    An environment reads `messages`, asks for a turn with `generate`, and answers with `add`.
    `state` is the environment's own, one per rollout.
    """

    def __init__(
        self, example: Example, messages: Sequence[Message], *, policy: Policy, sampling: Sampling
    ) -> None:
        self.example = example
        self.messages = list(messages)
        self.turns: list[Turn] = []
        self.state: dict[str, object] = {}
        self.metrics: dict[str, float] = {}
        self.tags: dict[str, str] = {}
        self.tools: Sequence[dict[str, JsonValue]] = ()
        """Shown to the policy in every turn that does not name others."""
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
        """Ask the policy for the next assistant message and append it."""
        started_s = time.monotonic()
        completion = await self._policy.complete(
            self.messages, self._sampling, tools=self.tools if tools is None else tools
        )
        self.turns.append(
            Turn(completion=completion, started_s=started_s, ended_s=time.monotonic())
        )
        self.messages.append(completion.message)
        return completion

    def add(self, *messages: Message) -> None:
        """Append what the environment says."""
        self.messages.extend(messages)
