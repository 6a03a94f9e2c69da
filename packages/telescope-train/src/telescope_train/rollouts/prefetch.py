"""Read, render and tokenize examples ahead, so that a free slot waits for no prompt."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.types import Message
from telescope_train.cluster.supervision import cancel
from telescope_train.rollouts.draw import Drawn, ExampleDraw

READERS = 8
"""Examples that are read at once; an environment may take as long as a download."""
Prepare = Callable[[str, Sequence[Message]], Awaitable[None]]
"""Awaited with the name of an environment and the first messages of a rollout."""
_LOGGER = logging.getLogger(__name__)


class Prefetch:
    """Prepares the next draws of a run in its own tasks, at most `size` of them."""

    def __init__(
        self,
        draw: ExampleDraw,
        first_messages: Callable[[Drawn], Awaitable[Sequence[Message]]],
        prepare: Prepare | None,
        *,
        size: int,
    ) -> None:
        """`draw`: gives the same examples as that of the run, and is used by nothing else.

        `first_messages` makes the environment read an example. `prepare` is called with the first
        messages of its rollout and with the environment, and awaited; None means no further work.
        """
        self._draw = draw
        self._first_messages = first_messages
        self._prepare = prepare
        self._size = size
        self._last = 0
        self._reading: dict[asyncio.Task[None], Drawn] = {}

    def keep_ahead_of(self, number: int) -> None:
        """Prepare the draws after `number`."""
        self._last = max(self._last, number + 1 + self._size)
        # Draws that have begun already are not prepared any more, such as after a restore.
        self._draw.skip_to(number + 1)
        self._read_more()

    async def close(self) -> None:
        """Stop preparing."""
        self._last = 0
        await cancel(list(self._reading))

    def _read_more(self) -> None:
        while len(self._reading) < READERS and self._draw.position < self._last:
            drawn = self._draw.next()
            task = asyncio.create_task(self._get_ready(drawn))
            self._reading[task] = drawn
            task.add_done_callback(self._was_read)

    async def _get_ready(self, drawn: Drawn) -> None:
        messages = await self._first_messages(drawn)
        if self._prepare is not None:
            await self._prepare(drawn.environment, messages)

    def _was_read(self, task: asyncio.Task[None]) -> None:
        drawn = self._reading.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _LOGGER.info(
                "example %d of %s was not made ready: %s: %s; whoever plays it reports it",
                drawn.example_index,
                drawn.environment,
                type(error).__name__,
                error,
            )
        self._read_more()


async def first_messages(
    client: EnvironmentClient, drawn: Drawn, system_prompts: Mapping[str, str]
) -> list[Message]:
    """Return the most likely first messages of a rollout of `drawn`.

    An environment may begin with other messages; its prompts are then rendered with the first
    request.
    """
    example = await client.example(drawn.split, drawn.example_index)
    prompt = example.prompt
    messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)
    system = system_prompts[drawn.environment]
    return [Message(role="system", content=system), *messages] if system else messages
