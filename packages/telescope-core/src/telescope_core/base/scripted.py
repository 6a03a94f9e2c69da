"""A policy that answers from a script, for tests and for trying out an environment."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import cast

from telescope_core.base.errors import ConfigError
from telescope_core.base.protocols import Policy
from telescope_core.base.types import ChatEndpoint, Completion, JsonValue, Message, Sampling, Tools

Reply = str | Completion | Exception


class ScriptedClient:
    """A policy source whose policies answer with scripted replies.

    `replies` is a list that every rollout starts from the beginning, or a function from messages
    to a reply. A reply that is an exception is raised. A list that runs out repeats its last
    reply. `delay_s` is the wait in seconds before each reply. `requests` records the messages of
    every request, over all rollouts, and `tools` the tools that each offered.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply],
        *,
        delay_s: float = 0.0,
    ) -> None:
        listed = cast(Sequence[object], () if callable(replies) else replies)
        if isinstance(listed, str) or not all(isinstance(one, Reply) for one in listed):
            raise ConfigError(
                "the replies of a ScriptedClient must be a list of texts, Completions and "
                f"exceptions, or a function of the messages, got {replies!r:.80}"
            )
        self.replies = replies
        self.delay_s = delay_s
        self.requests: list[tuple[Message, ...]] = []
        self.tools: list[tuple[Mapping[str, JsonValue], ...]] = []

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return a policy that starts with the first reply."""
        return _ScriptedPolicy(self)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _ScriptedPolicy:
    endpoint: ChatEndpoint | None = None

    def __init__(self, client: ScriptedClient) -> None:
        self._client = client
        self._turn = 0
        self._counted: list[tuple[Message, int]] = []

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        """Return the next reply."""
        self._client.requests.append(tuple(messages))
        self._client.tools.append(tuple(tools))
        if self._client.delay_s:
            await asyncio.sleep(self._client.delay_s)
        replies = self._client.replies
        if callable(replies):
            reply = replies(messages)
        elif not replies:
            raise ConfigError("a ScriptedClient without replies was asked; give it at least one")
        else:
            reply = replies[min(self._turn, len(replies) - 1)]
        self._turn += 1
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        return Completion(
            message=Message(role="assistant", content=reply),
            finish_reason="stop",
            num_prompt_tokens=self._num_words(messages),
            num_completion_tokens=len(reply.split()),
        )

    def _num_words(self, messages: Sequence[Message]) -> int:
        """Return the number of words in `messages`; those of the last request are not recounted."""
        pairs = zip(self._counted, messages, strict=False)
        known = sum(1 for _ in takewhile(lambda pair: pair[0][0] is pair[1], pairs))
        added = [(message, len(message.content.split())) for message in messages[known:]]
        self._counted = [*self._counted[:known], *added]
        return sum(number for _, number in self._counted)
