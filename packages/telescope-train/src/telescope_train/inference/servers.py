r"""Inference servers and their states; each may be lost at any time, and comes back.

    starting --> loading --> serving <--> updating
        \__________\___________\____________\___> lost --> starting | given up

Requests go to servers that serve or are being updated; `ByLoad` chooses the one with the most room.
Weights go to those and to a server that is loading: it has started again, and serves once it has
the present weights.
"""

import asyncio
import heapq
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from telescope_core.base import clock
from telescope_core.base.errors import EndpointError, ProcessDiedError
from telescope_core.base.types import WeightVersion
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_train.inference.generation import Generation, Request

_LOGGER = logging.getLogger(__name__)

CONTROL_DEADLINE_S = 120.0
"""Time limit of a control call with its repetitions, in seconds."""
ANSWER_WITHIN_S = 30.0
"""Seconds after which a control call with a deadline is made again: its answer may be lost, though
the connection is still there. The server does not do it twice."""
ALIVE_WITHIN_S = 20.0
"""Seconds for a sign of life, which the engine gives between two steps."""
UNLIMITED = 2**30
"""Number of requests of a server without a limit."""
_NEXT = {
    ServerState.STARTING: {ServerState.LOADING, ServerState.LOST},
    ServerState.LOADING: {ServerState.SERVING, ServerState.UPDATING, ServerState.LOST},
    ServerState.SERVING: {ServerState.UPDATING, ServerState.LOST},
    ServerState.UPDATING: {ServerState.SERVING, ServerState.LOST},
    ServerState.LOST: {ServerState.STARTING, ServerState.GIVEN_UP},
    ServerState.GIVEN_UP: set[ServerState](),
}
ROUTABLE = {ServerState.SERVING, ServerState.UPDATING}
"""States in which a server accepts requests."""
_MEMBERS = {*ROUTABLE, ServerState.LOADING}
_LINE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)
_MOST_PER_SERVER = 4
_FEW = 64
"""Number of entries of `ByLoad` that is never too large."""
Load = tuple[float, int]
"""Share of a server's slots that is in use, and its requests; the lowest one has most room."""
MOST_AT_ONCE = 256
"""Servers that are called at once: each call has its own task and connection."""
OnAnswer = Callable[[int, Any], None]
"""Called with the index of a server among those called, and its answer or EndpointError."""


class Reached(NamedTuple):
    """Address and identity of a server between two starts."""

    base_url: str
    identity: str = ""
    """Identity at that address; empty = any server there."""


class Loss(NamedTuple):
    """The reason for the loss of a server."""

    reason: str
    cause: str = ""
    """The first error in its output; empty if there is none, as when it was killed."""


class ServerDiedError(ProcessDiedError):
    """An inference server or its engine has died."""

    cause = ""
    """As in `Loss`."""

    @property
    def loss(self) -> Loss:
        """The same as a `Loss`."""
        return Loss(str(self), self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The load of a server at one moment."""

    cache_use: float
    """Share of the key-value cache that is in use, 0 to 1; the fullest engine counts."""
    num_preemptions: int
    """Number of requests that lost their cache to others, and are recomputed, since the start."""
    num_running: int
    num_waiting: int


def parse_load(text: str) -> ServerLoad | None:
    """Return the load in vLLM's Prometheus text; None if values are missing."""
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        found.setdefault(name, []).append(float(value))
    use = found.get("kv_cache_usage_perc")
    if use is None:
        return None
    return ServerLoad(
        # With data parallelism a server has several engines, each with a cache of its own.
        cache_use=max(use),
        num_preemptions=int(sum(found.get("num_preemptions_total", ()))),
        num_running=int(sum(found.get("num_requests_running", ()))),
        num_waiting=int(sum(found.get("num_requests_waiting", ()))),
    )


class ServerClient(Protocol):
    """The connections to one server; see `client.TokenClient`."""

    base_url: str
    identity: str
    """Identity of the present start of the server, to which requests are restricted."""
    num_in_flight: int
    """Number of requests without an answer yet."""
    heard_s: float
    """Time of the last answer, or part of one, on the clock of the event loop."""

    async def generate(self, request: Request) -> Generation:
        """Sample the rest of `request`; raises ServerLostError if the server is gone."""
        ...

    async def control(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
        deadline_s: float | None = CONTROL_DEADLINE_S,
    ) -> Any:
        """Call an administrative route, and return its answer.

        `deadline_s`: longest wait for it; None = until the server is dropped.
        """
        ...

    async def is_alive(self, *, within_s: float = ALIVE_WITHIN_S) -> bool:
        """Return whether the server's engine shows a sign of life within that many seconds."""
        ...

    async def load(self) -> ServerLoad | None:
        """Return the load of the server; None if it does not report it."""
        ...

    async def drop(self, why: str) -> None:
        """Fail all requests and control calls in flight with ServerLostError."""
        ...

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        ...


class Server:
    """One server at its address, over all its starts."""

    def __init__(
        self,
        client: ServerClient,
        *,
        role: ServerRole = ServerRole.ROLLOUT,
        on_event: Callable[[ServerEvent], None] | None = None,
    ) -> None:
        """Create a healthy server, with the weights that it was started with.

        `on_event` is called with each new state; None means no calls.
        """
        self.client = client
        self.role = role
        self.life = 1
        self.state = ServerState.SERVING
        self.version: WeightVersion = 0
        """Version of its present weights, or of those when it was lost."""
        self.reason = ""
        """The reason for its loss."""
        self.has_served = False
        """Whether it has sampled a token or been updated since its start."""
        self.has_sampled = False
        """Whether it has sampled a token since its start."""
        self.num_requests = 0
        """Requests from its pool that have not ended."""
        self.num_in_slots = 0
        """Those of them that hold a slot: requests of rollouts for training."""
        self.most_in_slots = UNLIMITED
        """Most requests with a slot, as long as another server has room for them."""
        self._ended_identity = ""
        """Identity before the last start, while the present one is not known."""
        self._on_event = on_event
        self._changed: asyncio.Event | None = None
        """Event that is set on the next change of state; None = nobody waits for it."""

    @property
    def takes_requests(self) -> bool:
        """Whether it accepts requests."""
        return self.state in ROUTABLE

    @property
    def has_room(self) -> bool:
        """Whether it has room for another request with a slot."""
        return self.num_in_slots < self.most_in_slots

    @property
    def takes_weights(self) -> bool:
        """Whether it takes part in the next update."""
        return self.state in _MEMBERS

    @property
    def has_ended(self) -> bool:
        """Whether it was lost, for good or until it is started again."""
        return self.state in (ServerState.LOST, ServerState.GIVEN_UP)

    def become(
        self, state: ServerState, *, version: WeightVersion | None = None, reason: str = ""
    ) -> None:
        """Change to another state; the same state has no effect."""
        if state is self.state:
            return
        if state not in _NEXT[self.state]:
            raise AssertionError(f"{self.client.base_url} cannot be {state} after {self.state}")
        if state is ServerState.STARTING:
            self.life += 1
            self.has_served = self.has_sampled = False
            self._ended_identity = self.client.identity
        if self.state is ServerState.UPDATING and state is ServerState.SERVING:
            self.has_served = True
        self.state = state
        self.version = self.version if version is None else version
        self.reason = reason
        _LOGGER.debug(
            "server %s, life %d: %s, weights %s, %d requests in flight%s",
            *(self.client.base_url, self.life, state.value, self.version),
            *(self.client.num_in_flight, f": {reason}" if reason else ""),
        )
        if self._on_event is not None:
            self._on_event(self._event())
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def until(self, *states: ServerState) -> None:
        """Wait until it is in one of `states`."""
        while self.state not in states:
            await self._until_changed()

    async def until_updated(self) -> None:
        """Wait for the end of an update, if one is going on."""
        while self.state is ServerState.UPDATING:
            await self._until_changed()

    async def _until_changed(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _event(self) -> ServerEvent:
        identity = self.client.identity
        return ServerEvent(
            time_s=clock.now_s(),
            server=self.client.base_url,
            identity="" if identity == self._ended_identity else identity,
            role=self.role,
            life=self.life,
            state=self.state,
            version=self.version,
            reason=self.reason,
        )


class Member(NamedTuple):
    """A server between two starts, such as while it takes part in an update."""

    server: Server
    life: int

    @property
    def is_left(self) -> bool:
        """Whether it is still the same start of the server, and takes weights."""
        return self.server.life == self.life and self.server.takes_weights


def load_of(server: Server) -> Load:
    """Return the load of a server for `ByLoad`."""
    return server.num_in_slots / server.most_in_slots, server.num_requests


class ByLoad:
    """The servers of a pool, ordered by their room; among equals, in the order of the pool.

    A heap holds an entry for every load that a server had. One that is not true any more is dropped
    when it comes up, and all are made anew before they outnumber the servers by far.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._numbers = {id(server): number for number, server in enumerate(servers)}
        self._entries: list[tuple[Load, int]] = []
        self._make_anew()

    def least(self) -> Server | None:
        """Return the server with most room among those that accept requests; None if none does."""
        while self._entries:
            load, number = self._entries[0]
            server = self._servers[number]
            if load == load_of(server) and server.takes_requests:
                return server
            heapq.heappop(self._entries)
        return None

    def add(self, server: Server, num_requests: int = 0, *, in_slots: bool = False) -> None:
        """Update the number of a server's requests, or its room."""
        server.num_requests += num_requests
        server.num_in_slots += num_requests if in_slots else 0
        if len(self._entries) >= _FEW + _MOST_PER_SERVER * len(self._servers):
            self._make_anew()
        heapq.heappush(self._entries, (load_of(server), self._numbers[id(server)]))

    def _make_anew(self) -> None:
        self._entries = [
            (load_of(server), number)
            for number, server in enumerate(self._servers)
            if server.takes_requests
        ]
        heapq.heapify(self._entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """A call for all servers."""

    path: str
    body: dict[str, Any] | None = None
    own: Mapping[int, dict[str, Any]] | None = None
    """Bodies for single servers, by index; None = all get `body`."""
    query: str = ""
    is_repeatable: bool = False
    """Whether repeating the call does no harm."""
    deadline_s: float | None = CONTROL_DEADLINE_S
    """Time limit for a server; None = until it is lost."""
    is_collective: bool = False
    """Whether no server answers before all are called, so that all are called at once."""

    def body_of(self, number: int) -> dict[str, Any] | None:
        """Return the body of the call to server `number`."""
        return self.body if self.own is None else self.own[number]


class CallServers(Protocol):
    """Calls servers; `call_servers`, or its replacement in a simulation."""

    def __call__(
        self, clients: Sequence[ServerClient], call: ControlCall, on_answer: OnAnswer
    ) -> Awaitable[None]:
        """Make `call` to all of `clients`; returns when each has answered or failed."""
        ...


async def call_servers(
    clients: Sequence[ServerClient], call: ControlCall, on_answer: OnAnswer
) -> None:
    """Make `call` to all of `clients`; `on_answer` is called as soon as one answers."""
    left = iter(enumerate(clients))

    async def work() -> None:
        for number, client in left:
            try:
                answer = await client.control(
                    call.path,
                    call.body_of(number),
                    query=call.query,
                    is_repeatable=call.is_repeatable,
                    deadline_s=call.deadline_s,
                )
            except EndpointError as error:
                answer = error
            on_answer(number, answer)

    num_workers = len(clients) if call.is_collective else min(len(clients), MOST_AT_ONCE)
    await asyncio.gather(*(work() for _ in range(num_workers)))
