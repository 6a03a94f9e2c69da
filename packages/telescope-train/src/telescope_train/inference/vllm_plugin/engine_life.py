"""`EngineLife`: a sign of life of the engine itself, not of the server in front of it.

vLLM's `/health` says that no error has come from the engine, but an engine that hangs sends no
error. This module sends a question that the engine answers between two of its steps, in its own
thread or process. An answer proves that steps end, however long their prompts are.
"""

import asyncio
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError


class EngineLife:
    """Checks whether an engine responds; concurrent callers share one check."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[Any] | None = None

    async def until_heard(self, engine: Any) -> None:
        """Return when `engine`, an `AsyncLLM`, answers; raises EngineDeadError if it is dead."""
        if engine.errored:
            raise EngineDeadError
        if self._asking is None or self._asking.done():
            # All engines: with data parallelism a server has several.
            question = engine.engine_core.call_utility_all_async("is_scheduler_paused")
            self._asking = asyncio.create_task(question)
        # Shielded, because others may wait for the same answer.
        await asyncio.shield(self._asking)
