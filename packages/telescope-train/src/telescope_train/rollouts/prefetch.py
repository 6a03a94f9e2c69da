"""Examples are read, rendered and tokenized ahead, so that a free lane waits for no prompt."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from telescope_core.errors import TelescopeError
from telescope_core.protocols import EnvironmentClient
from telescope_core.types import Message, Split
from telescope_train.rollouts.draw import Drawn, ExampleDraw


class Prefetch:
    """Follows the draws of a run in a task of its own, at most `size` of them ahead."""

    def __init__(
        self,
        draw: ExampleDraw,
        first_messages: Callable[[Drawn], Awaitable[Sequence[Message]]],
        prepare: Callable[[Sequence[Message]], object] | None,
        *,
        size: int,
    ) -> None:
        """`draw`: gives the same examples as that of the run, and is used by nobody else.

        `first_messages` makes the environment read an example; `prepare` gets what a rollout of it
        begins with, None = nothing more is done.
        """
        self._draw = draw
        self._first_messages = first_messages
        self._prepare = prepare
        self._size = size
        self._last = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_ready(self) -> int:
        """Draws that were made ready so far, those included that were skipped."""
        return self._draw.position

    def keep_ahead_of(self, number: int) -> None:
        """Get the draws after `number` ready."""
        self._last = max(self._last, number + 1 + self._size)
        if self._task is None or self._task.done():
            # What has begun already is not made ready any more, such as after a restore.
            self._draw.skip_to(number + 1)
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._draw.position < self._last:
            drawn = self._draw.next()
            try:
                messages = await self._first_messages(drawn)
                if self._prepare is not None:
                    self._prepare(messages)
            except TelescopeError:
                # Whoever plays the example meets the same error, and reports it.
                continue


async def first_messages(
    client: EnvironmentClient, drawn: Drawn, system_prompts: Mapping[str, str]
) -> list[Message]:
    """Return what a rollout of `drawn` most likely begins with.

    An environment may begin with other messages; then its prompts are rendered when they are asked.
    """
    example = await client.example(Split.TRAIN, drawn.example_index)
    prompt = example.prompt
    messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    system = system_prompts[drawn.environment]
    return [Message(role="system", content=system), *messages] if system else messages
