"""Read the meters of all machines and servers of a run repeatedly, into `gauges/`.

    every machine  --NodeMeters, asked by Ray--.
    every server   --GET /metrics--------------+-->  Meters  -->  gauges/, Prometheus, trackers

The list of machines and servers is refreshed before each reading, because they come and go. One
that does not answer in time is left out of that reading and delays no other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.system import LEAST_S, Reading
from telescope_train.observability.timeline import Clock
from telescope_train.observability.vllm_metrics import Page, meters, parse_page

ANSWER_S = 5.0
"""Seconds in which a machine or a server has to answer."""
READ_PER_S = 200
"""Most machines and servers that are read per second."""


class MeteredServer(Protocol):
    """The connection to a server."""

    @property
    def base_url(self) -> str:
        """Its address."""
        ...

    async def metrics_page(self) -> str | None:
        """Return its Prometheus text; None if it does not answer."""
        ...


class MeteredNode(Protocol):
    """The connection to a machine."""

    @property
    def name(self) -> str:
        """Its name for people."""
        ...

    async def read(self) -> Sequence[Reading]:
        """Return the readings of its meters."""
        ...


def show_nobody(source: str, samples: Sequence[GaugeSample]) -> None:
    """Do nothing with a reading."""


class Meters:
    """Reads all meters and passes on the readings."""

    def __init__(
        self,
        nodes: Callable[[], Awaitable[Sequence[MeteredNode]]],
        servers: Callable[[], Sequence[MeteredServer]],
        add: Callable[[GaugeSample], None],
        *,
        interval_s: float,
        show: Callable[[str, Sequence[GaugeSample]], None] = show_nobody,
    ) -> None:
        """`nodes` and `servers` return the present ones.

        `add` gets each reading. `show` gets all that a machine or a server shows now, which is
        nothing if it does not answer or is gone. Both must be quick and must not fail.
        """
        self._nodes = nodes
        self._servers = servers
        self._add = add
        self._show = show
        self._interval_s = interval_s
        self._clock = Clock()
        self._pages: dict[str, Page] = {}
        self._shown: set[str] = set()

    async def run(self) -> None:
        """Read repeatedly, until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            asked = await self.read()
            interval_s = max(self._interval_s, asked / READ_PER_S)
            await asyncio.sleep(max(0.0, begun_s + interval_s - loop.time()))

    async def read(self) -> int:
        """Read all meters once; returns the number of machines and servers that were asked."""
        nodes, servers = await self._nodes(), self._servers()
        await asyncio.gather(
            *(self._note(f"node {node.name}", _in_time(_node(node))) for node in nodes),
            *(self._note(one.base_url, _in_time(self._server(one))) for one in servers),
        )
        there = {*(f"node {node.name}" for node in nodes), *(one.base_url for one in servers)}
        for source in self._shown - there:
            self._show(source, ())
            self._pages.pop(source, None)
        self._shown = there
        return len(nodes) + len(servers)

    async def _server(self, server: MeteredServer) -> Iterable[Reading]:
        text = await server.metrics_page()
        before = self._pages.pop(server.base_url, None)
        if text is None:
            return ()
        page = parse_page(text, asyncio.get_running_loop().time())
        if before is not None and page.time_s - before.time_s < LEAST_S:
            self._pages[server.base_url], before = before, None
        else:
            self._pages[server.base_url] = page
        return [Reading("", name, value) for name, value in meters(page, before)]

    async def _note(self, source: str, answer: Awaitable[Iterable[Reading]]) -> None:
        shown = await answer
        time_s = self._clock.now_s()
        samples = [
            GaugeSample(time_s=time_s, source=f"{source} {part}".rstrip(), name=name, value=value)
            for part, name, value in shown
        ]
        for sample in samples:
            self._add(sample)
        self._show(source, samples)


async def _node(node: MeteredNode) -> Iterable[Reading]:
    return await node.read()


async def _in_time(reading: Awaitable[Iterable[Reading]]) -> Iterable[Reading]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await reading
    except (TimeoutError, OSError):
        return ()
