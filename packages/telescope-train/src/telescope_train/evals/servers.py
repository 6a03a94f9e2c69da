"""The servers for evals as one: their own, those of rollouts, or both."""

from dataclasses import replace

from telescope_core.evals.runner import parts_of_attempt
from telescope_core.records.servers import ServerState
from telescope_train.inference.generation import Generation, Request
from telescope_train.inference.pool import ServerPool
from telescope_train.observability.calls import Caller, CallLog

BEHIND_ROLLOUTS = 1_000_000
"""Added to the priority of each request, of which the lowest go first: no rollout that is trained
on waits for an eval, because the next step waits for it."""


class EvalServers:
    """Routes the requests of evals; see `inference.pool.RolloutServers`."""

    def __init__(self, rollouts: ServerPool, own: ServerPool | None = None) -> None:
        """`own`: servers that sample only evals; None = evals share those of rollouts."""
        self.rollouts = rollouts
        self.own = own
        self._used: tuple[ServerPool, ...] = (rollouts if own is None else own,)
        self._routes: dict[str, ServerPool] = {}
        self.playing = ""
        """Folder of the current eval, for the records of its calls."""

    @property
    def are_shared(self) -> bool:
        """Whether the servers for rollouts also sample evals beside training."""
        return self.own is None

    @property
    def is_down(self) -> bool:
        """Whether no server accepts requests now."""
        return all(pool.is_down for pool in self._used)

    @property
    def why_down(self) -> str:
        """Reason for the loss of one of the servers."""
        return next((one.reason for pool in self._used for one in pool.servers if one.reason), "")

    @property
    def num_servers(self) -> int:
        """Number of servers, including those that are about to come back; at least 1."""
        servers = [one for pool in self._used for one in pool.servers]
        return max(1, sum(one.state is not ServerState.GIVEN_UP for one in servers))

    def use_own(self) -> None:
        """Use the servers of evals, or those of rollouts if there are no others."""
        self._use(self.rollouts if self.own is None else self.own)

    def use_all(self) -> None:
        """Use all servers of the run."""
        self._use(self.rollouts, *(() if self.own is None else (self.own,)))

    async def generate(self, request: Request) -> Generation:
        """Sample one continuation, after all waiting requests of rollouts."""
        return await self._pool_of(request.group_id).generate(
            replace(request, priority=request.priority + BEHIND_ROLLOUTS)
        )

    def _use(self, *pools: ServerPool) -> None:
        self._used = pools
        self._routes.clear()

    def _pool_of(self, group_id: str) -> ServerPool:
        """Return the pool of a group's server; a new group goes to the least busy one."""
        pool = self._routes.get(group_id)
        if pool is None or pool.is_down:
            pool = self._routes[group_id] = min(self._used, key=_requests_per_server)
        return pool


class EvalCalls:
    """The servers of evals, for one attempt; each call is recorded."""

    def __init__(self, servers: EvalServers, calls: CallLog, attempt_id: str) -> None:
        self._servers = servers
        self._calls = calls
        self._group_id, self._index, self._attempt = parts_of_attempt(attempt_id)
        self._num_calls = 0

    @property
    def is_down(self) -> bool:
        """Whether no server takes requests now."""
        return self._servers.is_down

    async def generate(self, request: Request) -> Generation:
        """Sample one continuation, after all requests of rollouts that wait."""
        self._num_calls += 1
        caller = Caller(
            environment=self._servers.playing,
            group_id=self._group_id,
            index=self._index,
            attempt=self._attempt,
            call=self._num_calls,
            step=None,
        )
        return await self._servers.generate(replace(request, watching=self._calls.watching(caller)))


def _requests_per_server(pool: ServerPool) -> float:
    busy = [one.client.num_in_flight for one in pool.servers if one.takes_requests]
    return sum(busy) / len(busy) if busy else float("inf")
