"""Reads the meters of all machines and servers of a run again and again, into `gauges/`.

    every machine  --NodeMeters, asked by Ray--.
    every server   --GET /metrics--------------+-->  Meters  -->  gauges/, Prometheus

Who does not answer in time is left out of that reading and holds up nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.system import Reading
from telescope_train.observability.timeline import Clock
from telescope_train.observability.vllm_metrics import Page, meters, parse_page

ANSWER_S = 5.0
"""Seconds in which a machine or a server has to answer."""
READ_PER_S = 200
"""Machines and servers that are asked in a second at most."""


class MeteredServer(Protocol):
    """The way to a server."""

    @property
    def base_url(self) -> str:
        """Its address."""
        ...

    async def metrics_page(self) -> str | None:
        """Return its Prometheus text; None if it does not answer."""
        ...


class MeteredNode(Protocol):
    """The way to a machine."""

    @property
    def name(self) -> str:
        """How people call it."""
        ...

    async def read(self) -> Sequence[Reading]:
        """Return what its meters show."""
        ...


class Meters:
    """Reads all meters and hands on what they show."""

    def __init__(
        self,
        nodes: Sequence[MeteredNode],
        servers: Callable[[], Sequence[MeteredServer]],
        add: Callable[[GaugeSample], None],
        *,
        interval_s: float,
    ) -> None:
        """`servers` returns those that there are now; `add` must be quick and must not fail."""
        self._nodes = nodes
        self._servers = servers
        self._add = add
        self._interval_s = interval_s
        self._clock = Clock()
        self._pages: dict[str, Page] = {}

    async def run(self) -> None:
        """Read again and again, until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            await self.read()
            asked = len(self._nodes) + len(self._servers())
            interval_s = max(self._interval_s, asked / READ_PER_S)
            await asyncio.sleep(max(0.0, begun_s + interval_s - loop.time()))

    async def read(self) -> None:
        """Read all meters once."""
        await asyncio.gather(
            *(_in_time(self._read_node(node)) for node in self._nodes),
            *(_in_time(self._read_server(server)) for server in self._servers()),
        )

    async def _read_node(self, node: MeteredNode) -> None:
        for part, name, value in await node.read():
            self._note(f"node {node.name} {part}".rstrip(), [(name, value)])

    async def _read_server(self, server: MeteredServer) -> None:
        text = await server.metrics_page()
        if text is None:
            self._pages.pop(server.base_url, None)
            return
        page = parse_page(text, asyncio.get_running_loop().time())
        before, self._pages[server.base_url] = self._pages.get(server.base_url), page
        self._note(server.base_url, meters(page, before))

    def _note(self, source: str, shown: Iterable[tuple[str, float]]) -> None:
        time_s = self._clock.now_s()
        for name, value in shown:
            self._add(GaugeSample(time_s=time_s, source=source, name=name, value=value))


async def _in_time(reading: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(ANSWER_S):
            await reading
    except (TimeoutError, OSError):
        return
