"""A policy that says what it is told: for tests, for authors, and for trying an environment."""

import asyncio
from collections.abc import Callable, Sequence

from telescope_core.protocols import Policy
from telescope_core.types import ChatEndpoint, Completion, JsonValue, Message, Sampling

Reply = str | Completion | Exception


class ScriptedClient:
    """Answers with `replies`, in turn for each rollout, or with `reply(messages)`.

    An exception in the script is raised. A script that runs out repeats its last reply.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply],
        *,
        delay_s: float = 0.0,
    ) -> None:
        self._replies = replies
        self._delay_s = delay_s
        self.requests: list[tuple[Message, ...]] = []

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return a policy that starts at the first reply."""
        return _ScriptedPolicy(self._replies, self.requests, self._delay_s)

    async def close(self) -> None:
        """Nothing to release."""


class _ScriptedPolicy:
    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply],
        requests: list[tuple[Message, ...]],
        delay_s: float,
    ) -> None:
        self._replies = replies
        self._requests = requests
        self._delay_s = delay_s
        self._turn = 0

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """None: a script is no server."""
        return None

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Return the next reply."""
        self._requests.append(tuple(messages))
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        if callable(self._replies):
            reply = self._replies(messages)
        else:
            reply = self._replies[min(self._turn, len(self._replies) - 1)]
        self._turn += 1
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        return Completion(
            message=Message(role="assistant", content=reply),
            finish_reason="stop",
            num_prompt_tokens=sum(len(message.content.split()) for message in messages),
            num_completion_tokens=len(reply.split()),
        )
