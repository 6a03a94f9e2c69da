"""`TokenRecords`: write the facts about the tokens of a step during the next step."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from telescope_train.backends.protocol import Ranks
from telescope_train.batches.batch import StepPlan, TrainingSample
from telescope_train.step.records import StepRecords
from telescope_train.step.token_facts import turn_facts


class TokenRecords:
    """The writer of `token_facts/`; at the end of the block everything is on disk.

    Compression takes about 0.2 s for a million tokens, which no step should wait for.
    """

    def __init__(self, trainer: Ranks, folder: StepRecords, *, is_on: bool) -> None:
        self._trainer, self._folder, self._is_on = trainer, folder, is_on
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until the file of the last step is written."""
        # Also after an error: a run that goes back deletes files, and none may appear afterwards.
        await self._written()

    async def record(
        self, step: int, plan: StepPlan, samples: Sequence[TrainingSample], *, scale: float
    ) -> None:
        """Start to write the facts about the tokens of `step`; see `turn_facts`.

        A step that trained on nothing gets a file without rows. Raises the error of the write
        before.
        """
        if not self._is_on:
            return
        facts = await self._trainer.take_token_facts() if plan.order else []
        if plan.order and not any(facts):
            return  # the backend finds none

        def write() -> None:
            self._folder.write_token_facts(step, turn_facts(plan, facts, samples, scale=scale))

        await self._written()  # one at a time, so that no more than two steps are in memory
        self._writing = asyncio.create_task(asyncio.to_thread(write))

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing
