"""Read the meters of all machines and servers of a run repeatedly, into `gauges/`.

    every machine  --NodeMeters, asked by Ray--.
    every server   --GET /metrics--------------+-->  Meters  -->  gauges/, Prometheus, trackers

The list of machines and servers is refreshed before each reading, because they come and go. One
that does not answer in time is left out of that reading and delays no other.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from telescope_core.base import clock
from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.system import LEAST_S, Reading

ANSWER_S = 5.0
"""Seconds in which a machine or a server has to answer."""
READ_PER_S = 200
"""Most machines and servers that are read per second."""


_LINE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+|NaN)$")
_REASON = re.compile(r'reason="(\w+)"')

_GAUGES = {
    "num_requests_running": "vllm/requests_running",
    "num_requests_waiting": "vllm/requests_waiting",
}
"""Metrics that are summed over the engines of a server."""
_RATES = {
    "prompt_tokens_total": "vllm/prompt_tokens_per_s",
    "generation_tokens_total": "vllm/generation_tokens_per_s",
    "num_preemptions_total": "vllm/preemptions_per_s",
    "request_success_total": "vllm/requests_per_s",
}
_MEANS = {
    "time_to_first_token_seconds": "vllm/time_to_first_token_s",
    "inter_token_latency_seconds": "vllm/inter_token_latency_s",
    "request_queue_time_seconds": "vllm/queue_s",
    "request_prefill_time_seconds": "vllm/prefill_s",
    "request_decode_time_seconds": "vllm/decode_s",
    "e2e_request_latency_seconds": "vllm/request_s",
}
"""Histograms, recorded as the mean since the previous reading."""
_WAITING_FOR = "num_requests_waiting_by_reason"
_CACHE_USE, _CACHE_USE_NAME = "kv_cache_usage_perc", "vllm/kv_cache_used_share"
_HITS, _QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"
_HIT_NAME = "vllm/prefix_cache_hit_share"
SERVER_METERS = (
    *_GAUGES.values(),
    *("vllm/requests_waiting_for_capacity", "vllm/requests_waiting_deferred"),
    _CACHE_USE_NAME,
    _HIT_NAME,
    *_RATES.values(),
    *_MEANS.values(),
)
"""All possible names of meters of a server."""
_REASONS = {
    "capacity": "vllm/requests_waiting_for_capacity",
    "deferred": "vllm/requests_waiting_deferred",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics of a server at one moment."""

    time_s: float
    """Time on any monotonic clock."""
    values: Mapping[str, float]
    """vLLM's name -> sum over engines and labels; for waiting requests also `NAME/REASON`."""
    cache_use: float | None
    """Cache use of the fullest engine."""


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
            *(self._note(f"node {node.name}", _in_time(node.read())) for node in nodes),
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
        time_s = clock.now_s()
        samples = [
            GaugeSample(time_s=time_s, source=f"{source} {part}".rstrip(), name=name, value=value)
            for part, name, value in shown
        ]
        for sample in samples:
            self._add(sample)
        self._show(source, samples)


async def _in_time(reading: Awaitable[Iterable[Reading]]) -> Iterable[Reading]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await reading
    except (TimeoutError, OSError):
        return ()


def parse_page(text: str, time_s: float) -> Page:
    """Read vLLM's Prometheus text (names of vLLM 0.32).

    Most of its thousand lines are histogram buckets, which are skipped: it is read every second.
    """
    values: dict[str, float] = {}
    cache_use: float | None = None
    for line in text.split("\n"):
        if "_bucket{" in line or (found := _LINE.match(line)) is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        if name == _CACHE_USE:
            cache_use = value if cache_use is None else max(cache_use, value)
        elif name == _WAITING_FOR and (reason := _REASON.search(labels)):
            key = f"{name}/{reason[1]}"
            values[key] = values.get(key, 0.0) + value
        else:
            values[name] = values.get(name, 0.0) + value
    return Page(time_s, values, cache_use)


def meters(page: Page, before: Page | None) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of a server's meters; rates and means need the page `before`."""
    values = page.values
    now = {ours: theirs for theirs, ours in _GAUGES.items()}
    now |= {ours: f"{_WAITING_FOR}/{reason}" for reason, ours in _REASONS.items()}
    for ours, theirs in now.items():
        if theirs in values:
            yield ours, values[theirs]
    if page.cache_use is not None:
        yield _CACHE_USE_NAME, page.cache_use
    if before is not None:
        yield from _since(page, before)


def _since(page: Page, before: Page) -> Iterator[tuple[str, float]]:
    """Yield the changes between two pages.

    A server that was started again counts from 0, which is no negative rate.
    """

    def change(name: str) -> float:
        newer, older = page.values.get(name, 0.0), before.values.get(name, 0.0)
        return newer if newer < older else newer - older

    seconds = max(1e-3, page.time_s - before.time_s)
    for theirs, ours in _RATES.items():
        if theirs in page.values:
            yield ours, change(theirs) / seconds
    for theirs, ours in _MEANS.items():
        if count := change(f"{theirs}_count"):
            yield ours, change(f"{theirs}_sum") / count
    if queries := change(_QUERIES):
        yield _HIT_NAME, change(_HITS) / queries
