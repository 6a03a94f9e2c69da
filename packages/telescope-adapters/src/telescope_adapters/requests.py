"""The requests of a framework that sends whole conversations, as verifiers and inspect_ai do.

Apart from the settings that every adapter shares, because recording loads the gateway.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from telescope_core.base.types import Completion, Message, Tools
from telescope_core.environments import Episode
from telescope_core.gateway.policies import Recorder


class Requests:
    """A framework's requests to the policy of one episode, answered one at a time.

    Each holds a whole conversation. A framework may rewrite it, or have several: if any does not
    continue an earlier one, all of them are kept in `Episode.conversations`.
    """

    def __init__(self, episode: Episode[Any]) -> None:
        self.episode = episode
        self._recorder = Recorder()
        # The messages of the episode are those of the request that is answered.
        self._turns = asyncio.Lock()

    async def answer(
        self, messages: Sequence[Message], *, tools: Tools, stop: Sequence[str] = ()
    ) -> Completion:
        """Return the policy's answer to `messages`; raises what `Episode.generate` raises."""
        async with self._turns:
            self.episode.messages[:] = messages
            said = await self.episode.generate(tools=tools, stop=stop)
            self._recorder.heard(messages, said)
        conversations = self._recorder.conversations
        if len(conversations) > 1:
            self.episode.conversations = conversations
        return said
