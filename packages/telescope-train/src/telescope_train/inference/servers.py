r"""Inference servers and their states: each may be lost at any moment, and comes back.

    starting --> loading --> serving <--> updating
        \__________\___________\____________\___> lost --> starting | given up

Requests go to servers that serve or are being updated. Weights go to those and to a server that is
loading: it has started again, and serves once it has the present weights.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from telescope_core.base.errors import ProcessDiedError
from telescope_core.base.types import WeightVersion
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_train.inference.generation import Generation, Request
from telescope_train.inference.load import ServerLoad

_LOGGER = logging.getLogger(__name__)

CONTROL_DEADLINE_S = 120.0
"""Longest that a control call may take, its retries included, in seconds."""
ANSWER_WITHIN_S = 30.0
"""Seconds after which a control call with a deadline is made again: its answer may be lost, though
the connection is still there. The server does not do it twice."""
ALIVE_WITHIN_S = 20.0
"""Seconds for a sign of life: the engine gives it between two steps."""
UNLIMITED = 2**30
"""Requests of a server whose number nobody bounds."""
_NEXT = {
    ServerState.STARTING: {ServerState.LOADING, ServerState.LOST},
    ServerState.LOADING: {ServerState.SERVING, ServerState.UPDATING, ServerState.LOST},
    ServerState.SERVING: {ServerState.UPDATING, ServerState.LOST},
    ServerState.UPDATING: {ServerState.SERVING, ServerState.LOST},
    ServerState.LOST: {ServerState.STARTING, ServerState.GIVEN_UP},
    ServerState.GIVEN_UP: set[ServerState](),
}
ROUTABLE = {ServerState.SERVING, ServerState.UPDATING}
"""States in which a server takes requests."""
_MEMBERS = {*ROUTABLE, ServerState.LOADING}


class Reached(NamedTuple):
    """How a server is reached in one of its lives."""

    base_url: str
    identity: str = ""
    """What it answers to there; empty = whatever server is there is meant."""


class Loss(NamedTuple):
    """Why a server is lost."""

    reason: str
    cause: str = ""
    """The first error that it printed; empty if it printed none, as when it was killed."""


class ServerDiedError(ProcessDiedError):
    """An inference server or its engine has died."""

    cause = ""
    """As of `Loss`."""

    @property
    def loss(self) -> Loss:
        """The same, as of a server that is lost."""
        return Loss(str(self), self.cause)


class ServerClient(Protocol):
    """The way to one server; see `client.TokenClient`."""

    base_url: str
    identity: str
    """Of the present life of the server: nothing else is asked."""
    num_in_flight: int
    """Requests that it has not answered yet."""
    heard_s: float
    """When it last answered a request, or a part of one, on the clock of the event loop."""

    async def generate(self, request: Request) -> Generation:
        """Sample what is left of `request`; raises ServerLostError if the server is gone."""
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
        """Return whether the server's engine gives a sign of life within so many seconds."""
        ...

    async def load(self) -> ServerLoad | None:
        """Return how busy the server is; None if it does not say."""
        ...

    async def drop(self, why: str) -> None:
        """Fail all requests and control calls in flight with ServerLostError."""
        ...

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        ...


class Server:
    """One server under its address, through all of its lives."""

    def __init__(
        self,
        client: ServerClient,
        *,
        role: ServerRole = ServerRole.ROLLOUT,
        on_event: Callable[[ServerEvent], None] | None = None,
    ) -> None:
        """A server that is healthy, with the weights that it was started with.

        `on_event` is told of each state; None = nobody is.
        """
        self.client = client
        self.role = role
        self.life = 1
        self.state = ServerState.SERVING
        self.version: WeightVersion = 0
        """The weights that it holds, or held when it was lost."""
        self.reason = ""
        """Why it was lost."""
        self.has_served = False
        """Whether it has sampled a token or gone through an update in its present life."""
        self.has_sampled = False
        """Whether it has sampled a token in its present life."""
        self.num_requests = 0
        """Requests that its pool has sent there and that have not ended."""
        self.num_in_slots = 0
        """Those of them that hold a slot: the requests of rollouts that are trained on."""
        self.most_in_slots = UNLIMITED
        """Most requests with a slot that are sent there while another server has room for them."""
        self._ended_identity = ""
        """Of the life before, while that of the present one is not known."""
        self._on_event = on_event
        self._changed: asyncio.Event | None = None
        """Is set when another state begins; None = nobody waits for that."""

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state in ROUTABLE

    @property
    def has_room(self) -> bool:
        """Whether it may be sent one more request with a slot."""
        return self.num_in_slots < self.most_in_slots

    @property
    def takes_weights(self) -> bool:
        """Whether it is to get the next weights."""
        return self.state in _MEMBERS

    @property
    def has_ended(self) -> bool:
        """Whether it was lost, for good or until it is started again."""
        return self.state in (ServerState.LOST, ServerState.GIVEN_UP)

    def become(
        self, state: ServerState, *, version: WeightVersion | None = None, reason: str = ""
    ) -> None:
        """Begin another state; the same one again changes nothing."""
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
            time_s=time.time(),
            server=self.client.base_url,
            identity="" if identity == self._ended_identity else identity,
            role=self.role,
            life=self.life,
            state=self.state,
            version=self.version,
            reason=self.reason,
        )


class Member(NamedTuple):
    """A server in one of its lives, such as while it takes part in an update."""

    server: Server
    life: int

    @property
    def is_left(self) -> bool:
        """Whether that life goes on, and takes weights."""
        return self.server.life == self.life and self.server.takes_weights
