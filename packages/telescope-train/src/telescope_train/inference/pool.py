"""Several inference servers as one: a group stays on one server, new groups go to the least busy.

A group's rollouts share their prompt, so one server computes it once (prefix caching). A server
that has its maximum number of requests gets no more while another one has room. If the server of a
request dies, the request continues at another one, with the tokens sampled so far.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from telescope_core.base.types import WeightVersion
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_train.inference.generation import (
    Generation,
    Request,
    RequestAbortedError,
    ServerLostError,
)
from telescope_train.inference.servers import ROUTABLE, ByLoad, Server, ServerClient
from telescope_train.observability.calls import CallEnd, Watching

MOST_STEPS = 2**20
"""Steps that servers can distinguish; in a longer run, the last ones are equal to them."""
MAX_ROUTES = 20_000
"""Groups, and rollouts that are elsewhere, whose server is remembered. One that is forgotten loses
only its cached prefix."""


class RolloutServers(Protocol):
    """Samples for the policy of one rollout: the pool, or a wrapper around it."""

    @property
    def is_down(self) -> bool:
        """Whether no server accepts requests now."""
        ...

    async def generate(self, request: Request) -> Generation:
        """Sample one continuation."""
        ...


def server_priority(priority: int, step: int, *, is_again: bool) -> int:
    """Return the priority for servers as one number; lower ones go first.

    The order is: first `priority`, such as that of a later turn; then the `step` for whose batch a
    rollout was drawn, because the trainer waits for the oldest batch; then requests that have
    waited before.
    """
    return 2 * (priority * MOST_STEPS + min(step, MOST_STEPS - 1)) + (not is_again)


class ServerPool:
    """Routes requests to the servers that serve; `version` is the newest that all of them have.

    If the server of a request is lost, the request continues at another one, after the tokens that
    it has.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        *,
        on_event: Callable[[ServerEvent], None] | None = None,
        is_kept: bool = False,
        role: ServerRole = ServerRole.ROLLOUT,
    ) -> None:
        """`is_kept`: lost servers come back, so requests wait while no other one serves."""
        self.servers = [Server(client, role=role, on_event=on_event) for client in clients]
        self._by_load = ByLoad(self.servers)
        self.version: WeightVersion = 0
        self._is_kept = is_kept
        self._serves = asyncio.Event()
        self._routes: OrderedDict[str, Server] = OrderedDict()

    @property
    def clients(self) -> list[ServerClient]:
        """The clients of all servers, including lost ones."""
        return [server.client for server in self.servers]

    @property
    def is_down(self) -> bool:
        """Whether no server accepts requests."""
        return not any(server.takes_requests for server in self.servers)

    @property
    def is_given_up(self) -> bool:
        """Whether no server is left that could come back."""
        return all(server.state is ServerState.GIVEN_UP for server in self.servers)

    @property
    def num_lost(self) -> int:
        """Number of servers that accept no requests now."""
        return sum(not server.takes_requests for server in self.servers)

    async def generate(self, request: Request) -> Generation:
        """Sample one continuation on the group's server; see `server_priority` for the order.

        If the group's server has its maximum number of requests, a rollout that holds a slot moves
        to another server, with its later turns.
        """
        begun: Generation | None = None
        is_again = False
        position = request.position
        in_slots, step = position is not None, 0 if position is None else position.step
        watched = _Watched(len(request.prompt_ids), request.watching)
        while True:
            server = self._route(request) or await self._wait_for_route(request)
            life = server.life
            watched.is_sent(server.client.base_url, self.version, begun)
            self._by_load.add(server, 1, in_slots=in_slots)
            try:
                # vLLM shares cached prefixes only between requests with the same salt, so that a
                # prefix computed under older weights is never reused.
                generation = await server.client.generate(
                    replace(
                        request,
                        cache_salt=f"v{self.version}",
                        priority=server_priority(request.priority, step, is_again=is_again),
                        begun=begun,
                    )
                )
            except RequestAbortedError as error:
                watched.has_ended(error.begun, error="ended for an update of the weights")
                _note_tokens(server, life, begun, error.begun)
                begun = error.begun or begun
                # Only then the request is of the new weights, and says so.
                await server.until_updated()
                is_again = True
            except ServerLostError as error:
                watched.has_ended(error.begun, error=str(error))
                _note_tokens(server, life, begun, error.begun)
                begun = error.begun
                self.lose(server, str(error), life=life)
                if self.is_down and not self._is_kept:
                    raise
                is_again = True
            except BaseException as error:
                is_canceled = isinstance(error, asyncio.CancelledError)
                watched.has_ended(begun, error="canceled" if is_canceled else str(error))
                raise
            else:
                watched.has_ended(generation)
                _note_tokens(server, life, begun, generation)
                return generation
            finally:
                self._by_load.add(server, -1, in_slots=in_slots)

    async def until_down(self) -> None:
        """Wait until no server accepts requests."""
        others = [state for state in ServerState if state not in ROUTABLE]
        while serving := next((one for one in self.servers if one.takes_requests), None):
            await serving.until(*others)

    def lose(self, server: Server, reason: str, *, life: int | None = None) -> None:
        """Stop using a server. Later events of an earlier `life` of it have no effect."""
        if server.has_ended or (life is not None and life != server.life):
            return
        server.become(ServerState.LOST, reason=reason)
        _LOST.add(task := asyncio.ensure_future(server.client.drop(reason)))
        task.add_done_callback(_LOST.discard)
        if self.is_down:
            self._serves.clear()

    def give_up(self, server: Server) -> None:
        """Never wait for a lost server again; requests that waited for the last one fail."""
        server.become(ServerState.GIVEN_UP, reason=server.reason)
        if self.is_given_up:
            self._serves.set()

    def serve(self, server: Server, version: WeightVersion) -> None:
        """Start using a server, which has the weights `version`."""
        is_back = not server.takes_requests
        server.become(ServerState.SERVING, version=version)
        if is_back:
            self._by_load.add(server)
        self._serves.set()

    def limit(self, most_in_slots: int) -> None:
        """Limit each server's requests with a slot, as long as another server has room."""
        for server in self.servers:
            server.most_in_slots = most_in_slots
            self._by_load.add(server)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        for client in self.clients:
            await client.close()

    # Nothing is awaited from here until the request is counted in `num_requests`. The other
    # rollouts of the group, which ask at the same moment, therefore find its route, and the next
    # group sees how busy this server has become.
    def _route(self, request: Request) -> Server | None:
        """Return the server for a rollout; None if none serves."""
        group_id, position = request.group_id, request.position
        names = [group_id] if position is None else [position.rollout_id, group_id]
        found = {name: self._routes.get(name) for name in names}
        known = [one for one in found.values() if one is not None and one.takes_requests]
        for server in known:
            if server.has_room or position is None:
                return server
        server = self._by_load.least()
        if server is None:
            return None
        if known and not server.has_room:
            # Nobody has room: what a lost server was working on goes on at once.
            return known[0]
        # Only this rollout moves, if its group has a server.
        self._remember(names[0] if found[group_id] in known else group_id, server)
        return server

    def _remember(self, name: str, server: Server) -> None:
        self._routes[name] = server
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)

    async def _wait_for_route(self, request: Request) -> Server:
        while (server := self._route(request)) is None:
            if not self._is_kept or self.is_given_up:
                raise ServerLostError(f"no inference server is left: {self.servers[0].reason}")
            await self._serves.wait()
        return server


def _note_tokens(
    server: Server, life: int, begun: Generation | None, now: Generation | None
) -> None:
    """Record that a server has sampled something, if `now` is more than `begun`."""
    num_begun = 0 if begun is None else len(begun.token_ids)
    if life == server.life and now is not None and len(now.token_ids) > num_begun:
        server.has_served = server.has_sampled = True


class _Watched:
    """One model call on its way through servers; its end at each of them is reported."""

    def __init__(self, num_prompt_tokens: int, watching: Watching) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._watching = watching
        self._server = ""
        self._version: WeightVersion = 0
        self._num_begun = 0
        self._sent_s = 0.0

    def is_sent(self, server: str, version: WeightVersion, begun: Generation | None) -> None:
        """Record the present server of the call, and the part that was sampled elsewhere."""
        self._server, self._version = server, version
        self._num_begun = 0 if begun is None else len(begun.token_ids)
        self._sent_s = asyncio.get_running_loop().time()
        self._watching.on_sent(server, version)

    def has_ended(self, generation: Generation | None, *, error: str = "") -> None:
        """Record the tokens that the server has sampled, and the error that ended it."""
        num_tokens = 0 if generation is None else len(generation.token_ids)
        self._watching.on_end(
            CallEnd(
                server=self._server,
                version=_version_at(generation, self._num_begun, self._version),
                sent_s=self._sent_s,
                ended_s=asyncio.get_running_loop().time(),
                num_prompt_tokens=self._num_prompt_tokens + self._num_begun,
                num_completion_tokens=max(0, num_tokens - self._num_begun),
                timing=None if generation is None or error else generation.timing,
                error=error,
            )
        )


def _version_at(
    generation: Generation | None, position: int, otherwise: WeightVersion
) -> WeightVersion:
    """Return the version for the token at `position`; `otherwise` if there is none."""
    end = 0
    for span in () if generation is None else generation.spans:
        end += span.num_tokens
        if position < end:
            return span.version
    return otherwise


_LOST = set[asyncio.Future[None]]()
"""Connections that are being dropped; kept here because the event loop holds tasks weakly."""
