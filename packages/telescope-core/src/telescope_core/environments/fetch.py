"""`ExampleFetcher`: reads examples without blocking the loop, and only once per group."""

import asyncio

from telescope_core.base.protocols import ExampleSource
from telescope_core.base.types import Example, Split
from telescope_core.environments.calls import Caller
from telescope_core.environments.running import noting
from telescope_core.environments.sources import CheckedSources

_Key = tuple[Split, int]
_KEPT = 512
"""Most examples kept in memory. The rollouts of a group and its group reward need the same example
soon after each other."""


class ExampleFetcher:
    """Reads example sources in a thread; concurrent requests for one example share one read."""

    def __init__(self, sources: CheckedSources, caller: Caller) -> None:
        self._sources = sources
        self._caller = caller
        self._known: dict[_Key, Example] = {}
        self._reading: dict[_Key, asyncio.Task[Example]] = {}

    def source(self, split: Split) -> ExampleSource:
        """Return the checked examples of `split`; may read files, so call it in a thread."""
        return self._sources.of(split)

    async def get(self, split: Split, index: int) -> Example:
        """Return example `index` of `split`."""
        key = (split, index)
        if key in self._known:
            return self._known[key]
        task = self._reading.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = asyncio.create_task(self._read(key))
            self._reading[key] = task
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, key: _Key) -> Example:
        split, index = key

        def read() -> Example:
            source = self.source(split)
            with noting(source.example, "data"):
                return source.example(index)

        found = await self._caller.in_thread(read)
        if len(self._known) >= _KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[key] = found
        return found
