"""Our `play` driven from outside: who asks for the next request also brings the answer.

Other frameworks step an environment; ours asks a policy. `Stepped` runs `play` as a task whose
policy waits, shows each request and takes each answer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from telescope_core.base.errors import TelescopeError
from telescope_core.base.protocols import EnvironmentClient, PlayRequest
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    JsonValue,
    Message,
    Rollout,
    Sampling,
    Split,
)

_MAX_TOKENS = 1 << 20
"""Token limit of an answer, which the other framework sets."""
_ROLLOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One question of the environment to the policy."""

    messages: tuple[Message, ...]
    """The whole conversation."""
    new: tuple[Message, ...]
    """The messages since the last answer; for the first request, all of them."""
    is_rewritten: bool = False
    """Whether the conversation is not the one before, continued; `new` is the whole of it then."""
    tools: tuple[dict[str, JsonValue], ...] = ()


class Stepped:
    """One rollout that waits for its answers."""

    def __init__(self, client: EnvironmentClient, split: str, index: int, *, group_id: str) -> None:
        """Start a rollout of an example; call it on the event loop that steps it."""
        self._policy = _Waiting()
        request = PlayRequest(
            split=Split(split),
            example_index=index,
            group_id=group_id,
            index=0,
            sampling=Sampling(max_tokens=_MAX_TOKENS),
            deadline_s=_ROLLOUT_S,
        )
        self._playing = asyncio.create_task(client.play(request, self._policy))

    async def begun(self) -> ModelCall | Rollout:
        """Return the first request, or the rollout if it ended without one."""
        return await self._next()

    async def answered(self, completion: Completion) -> ModelCall | Rollout:
        """Pass an answer, and return the next request or the scored rollout."""
        if self._playing.done():
            raise TelescopeError("the rollout has ended; begin another one")
        self._policy.answers.put_nowait(completion)
        return await self._next()

    def cancel(self) -> None:
        """End the rollout; may be called from any thread."""
        self._playing.get_loop().call_soon_threadsafe(self._playing.cancel)

    async def _next(self) -> ModelCall | Rollout:
        asked = asyncio.create_task(self._policy.asked.get())
        try:
            await asyncio.wait([asked, self._playing], return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else self._playing.result()
        finally:
            asked.cancel()


class _Waiting:
    """A policy whose answers come from outside."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[ModelCall] = asyncio.Queue()
        self.answers: asyncio.Queue[Completion] = asyncio.Queue()
        self._shown: list[Message] = []

    @property
    def endpoint(self) -> ChatEndpoint | None:
        """None: stepped rollouts have no endpoint."""
        return None

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Pass a request outside, and return the answer from there."""
        whole, num_shown = tuple(messages), len(self._shown)
        # Thinking may be left out of a conversation that goes on.
        is_rewritten = [replace(one, reasoning="") for one in whole[:num_shown]] != self._shown
        new = whole if is_rewritten else whole[num_shown:]
        self.asked.put_nowait(
            ModelCall(messages=whole, new=new, is_rewritten=is_rewritten, tools=tuple(tools))
        )
        completion = await self.answers.get()
        self._shown = [replace(one, reasoning="") for one in (*whole, completion.message)]
        return completion
