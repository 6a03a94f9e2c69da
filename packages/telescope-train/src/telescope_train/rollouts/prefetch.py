"""Examples are read, rendered and tokenized ahead, so that a free lane waits for no prompt."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from telescope_core.protocols import EnvironmentClient
from telescope_core.types import Message, Split
from telescope_train.rollouts.draw import Drawn, ExampleDraw

READERS = 8
"""Examples that are read at the same time; each may take its environment as long as a download."""
_LOGGER = logging.getLogger(__name__)


class Prefetch:
    """Follows the draws of a run in tasks of its own, at most `size` of them ahead."""

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
        self._readers: set[asyncio.Task[None]] = set()

    @property
    def num_ready(self) -> int:
        """Draws that were made ready so far, those included that were skipped."""
        return self._draw.position

    def keep_ahead_of(self, number: int) -> None:
        """Get the draws after `number` ready."""
        self._last = max(self._last, number + 1 + self._size)
        # What has begun already is not made ready any more, such as after a restore.
        self._draw.skip_to(number + 1)
        num_left = self._last - self._draw.position
        for _ in range(min(READERS - len(self._readers), num_left)):
            reader = asyncio.create_task(self._read())
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)

    async def close(self) -> None:
        """Stop."""
        readers = list(self._readers)
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)

    async def _read(self) -> None:
        while self._draw.position < self._last:
            drawn = self._draw.next()
            try:
                messages = await self._first_messages(drawn)
                if self._prepare is not None:
                    self._prepare(messages)
            except Exception as error:  # noqa: BLE001 - nobody awaits this, and no rollout needs it
                _LOGGER.info(
                    "example %d of %s was not made ready: %s: %s; whoever plays it reports it",
                    drawn.example_index,
                    drawn.environment,
                    type(error).__name__,
                    error,
                )


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
