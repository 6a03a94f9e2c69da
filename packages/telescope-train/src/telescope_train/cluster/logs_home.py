"""Fetch the logs of nodes that do not share the run folder, again and again.

    a node's own disk:  LOGS/*.jsonl  --> LogReader (an actor there) --> LogsHome --> LOGS here

A file keeps its name, and its bytes their order. If a node is lost, the bytes that were not fetched
before are lost with it.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from telescope_core.records.logs import base_name
from telescope_train.cluster.nodes import Node, on_node

_LOGGER = logging.getLogger(__name__)
EVERY_S = 2.0
"""Seconds between two requests to a node."""
LAST_S = 10.0
"""Longest wait in seconds for the last output of a node."""
MOST_BYTES = 8 * 2**20
"""Most bytes in one answer of a node."""


class LogPart(NamedTuple):
    """The new bytes of one file."""

    name: str
    was: str
    """Its earlier name, if it was renamed because it was full."""
    content: bytes


class _Known(NamedTuple):
    """The known part of a file."""

    name: str
    num_bytes: int


class LogReader:
    """Reads the additions to the logs on a node."""

    def __init__(self, folder: Path) -> None:
        """Files that already exist are of an earlier start of the run, which has fetched them."""
        self._folder = folder
        self._known: dict[int, _Known] = {}
        """By inode, which a renamed file keeps."""
        for path in self._files():
            with suppress(OSError):
                found = path.stat()
                self._known[found.st_ino] = _Known(path.name, found.st_size)

    def more(self) -> list[LogPart]:
        """Return the new parts since the last call, at most `MOST_BYTES`; none = that was all."""
        parts: list[LogPart] = []
        room = MOST_BYTES
        for path in self._files():
            with suppress(OSError), path.open("rb") as stream:
                inode = os.fstat(stream.fileno()).st_ino
                known = self._known.get(inode, _Known(path.name, 0))
                stream.seek(known.num_bytes)
                content = stream.read(room)
                self._known[inode] = _Known(path.name, known.num_bytes + len(content))
                room -= len(content)
                if content or known.name != path.name:
                    parts.append(LogPart(path.name, known.name, content))
        return parts

    def _files(self) -> list[Path]:
        """Return the files, the oldest of each log first, in the order for renaming."""
        with suppress(OSError):
            return sorted(self._folder.iterdir(), key=lambda path: -base_name(path.name)[1])
        return []


More = Callable[[], Awaitable[Sequence[LogPart]]]
"""`LogReader.more` on a node; raises RayError if the node has gone."""


class LogsHome:
    """Fetches the logs of other nodes into the folder of the run."""

    def __init__(self, folder: Path, readers: Mapping[str, More]) -> None:
        """`readers`: by name of the node, for messages."""
        self._folder = folder
        self._readers = dict(readers)
        self._fetching: asyncio.Future[list[None]] | None = None

    @classmethod
    def of_none(cls) -> "LogsHome":
        """Return one without nodes, for a run whose processes all write here."""
        return cls(Path(), {})

    @property
    def nodes(self) -> list[str]:
        """The nodes whose logs are fetched."""
        return sorted(self._readers)

    async def run(self) -> None:
        """Fetch repeatedly, until canceled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.fetch()

    async def fetch(self) -> None:
        """Fetch all new parts; a node that has gone is skipped from then on."""
        self._fetching = asyncio.gather(*(self._fetch_of(name) for name in list(self._readers)))
        # A node does not read what it has sent again, so cancellation must not lose its answer.
        await asyncio.shield(self._fetching)

    async def finish(self) -> None:
        """Fetch the rest, from nodes that answer soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                if self._fetching is not None and not self._fetching.done():
                    await self._fetching
                await self.fetch()

    async def _fetch_of(self, name: str) -> None:
        reader = self._readers[name]
        try:
            while parts := await reader():
                await asyncio.to_thread(self._write, parts)
        except RayError as error:
            self._readers.pop(name, None)
            _LOGGER.info("logs of %s are no longer fetched: %s", name, error)

    def _write(self, parts: Sequence[LogPart]) -> None:
        for part in parts:
            path = self._folder / part.name
            if part.was != part.name:
                with suppress(FileNotFoundError):
                    (self._folder / part.was).replace(path)
            # Appended: a process that goes on elsewhere has its log go on too.
            with path.open("ab") as stream:
                stream.write(part.content)


def logs_home(folder: Path, nodes: Iterable[Node]) -> LogsHome:
    """Return the `LogsHome` for logs in `folder` of those `nodes` that do not share it."""
    actor: Any = ray.remote(LogReader)
    readers = {node.label: actor.options(**on_node(node.id)).remote(folder) for node in nodes}
    return LogsHome(folder, {name: reader.more.remote for name, reader in readers.items()})
