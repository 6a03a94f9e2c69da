"""A versioned update of all servers, of weights or of an adapter: pause, send, version, resume.

A server resumes only after it has received everything and has confirmed this with a digest. It then
knows its version, which its engine gives to every token that it samples from then on. A server that
fails on the way is lost: it is left out, the rest get the weights again from the start if they have
to, and it is started again by itself (`inference.supervisor`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from telescope_core.base.errors import EndpointError, TelescopeError
from telescope_core.base.types import WeightVersion
from telescope_core.records.servers import ServerState
from telescope_train.backends.protocol import RankDiedError, Ranks, TransferError
from telescope_train.backends.transfer import Place, TensorHeader, Wire
from telescope_train.inference.generation import ServerLostError
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import (
    CONTROL_DEADLINE_S,
    CallServers,
    ControlCall,
    Member,
    Server,
    call_servers,
)
from telescope_train.inference.wire import (
    PAUSE_AND_ABORT,
    PAUSE_AND_CLEAR,
    PAUSE_AND_KEEP,
    PAUSE_PATH,
)
from telescope_train.weights.digests import difference

_LOGGER = logging.getLogger(__name__)

Result = TypeVar("Result")

InFlight = Literal["continue", "pause", "abort"]
"""Whether requests in flight keep what the old weights computed of their prefix (`continue`),
compute it again under the new ones (`pause`), or are ended and sent again with it (`abort`)."""
_PAUSE_QUERIES = {
    "continue": PAUSE_AND_KEEP,
    "pause": PAUSE_AND_CLEAR,
    "abort": PAUSE_AND_ABORT,
}
MOST_TRIES = 4
"""Consecutive attempts to send weights before it fails without a server at fault."""
MOST_SPOILED = 2
"""Consecutive spoiled transfers before the server that failed first counts as lost."""
LEFT_ALONE_S = 15.0
"""Seconds in which a server leaves a transfer that the ranks have left, before it is lost.

One that waits for rank 0 would do so for two minutes; it is back sooner if it is started again."""
OTHERS_WAIT_S = 15.0
"""Longest that anybody waits for a server of `send_to`, in seconds.

The trainer stands still meanwhile, and does not need the work of these servers."""
SIGN_WITHIN_S = 5.0
"""Seconds for such a server's sign of life before a transfer; it has no other work."""

_LEFT_BEHIND = ServerLostError("it waits in a transfer that the trainer has left")
_SILENT = ServerLostError("everything has been sent, and it did not say that it has received it")


class SpoiledError(TransferError):
    """A living server did not take part in a transfer."""

    def __init__(self, message: str, member: Member) -> None:
        """`member`: the first one to fail; others may have failed because of it."""
        super().__init__(message)
        self.member = member


class WeightPublisher:
    """Publishes the trainer's weights to every server of the pool."""

    def __init__(
        self,
        pool: ServerPool,
        ranks: Ranks,
        *,
        in_flight: InFlight,
        sends_adapter: bool = False,
        wire: Wire | None = None,
        others: Sequence[ServerPool] = (),
        call: CallServers = call_servers,
    ) -> None:
        """`sends_adapter`: the ranks send a LoRA adapter instead of weights.

        `wire`: how they travel; None = over TCP. `others`: pools that get weights by `send_to`
        only. `call` calls many servers.
        """
        self._call = call
        self._pool = pool
        self._pool_by_server = {
            id(server): one for one in (pool, *others) for server in one.servers
        }
        self._ranks = ranks
        self._sends_adapter = sends_adapter
        self._wire = wire or Wire()
        self._pause_query = f"?{_PAUSE_QUERIES[in_flight]}"
        self._headers: list[TensorHeader] = []
        self._sending = asyncio.Lock()
        self._group: list[Member] = []
        """Servers, each between two starts, that can receive from the ranks now."""
        self._are_ranks_ahead = False
        self._open_updates = set[Member]()
        """Servers whose update has begun and not failed."""

    async def connect(self) -> None:
        """Create the transfer group of trainer rank 0 and all servers.

        Servers that compute an adapter get the first one here, because requests name it from the
        start: one that was added later would not be computed for those that are running then.
        """
        async with self._sending:
            await self._know_headers()
            failure = await self._with_all(_members_of(self._pool), self._join)
        if failure is None and self._sends_adapter:
            failure = await to_its_end(self._publish(self._pool.version, self._pause_query))
        if failure is not None:
            # No server could ever join, or take an adapter: what is wrong is not one of them.
            raise failure

    async def weights_change(self) -> None:
        """Announce that the ranks' weights are about to differ from those of `pool.version`.

        Until the next `publish`, no server gets them.
        """
        async with self._sending:
            self._are_ranks_ahead = True

    async def publish(self, version: WeightVersion) -> None:
        """Make `version` live on all servers; returns when every server samples from it.

        If none is left, it is live on those that come back.
        """
        # To its end, even if whoever waits for it gives up: a server in the middle of an update
        # takes part in no other one.
        await to_its_end(self._publish(version, self._pause_query))

    async def restore(self, version: WeightVersion) -> None:
        """Make the weights of new ranks live; `version` may be older than the live one.

        Values that servers cached under other weights with the same number are dropped. No request
        may run meanwhile.
        """
        async with self._sending:
            self._group = []
        await to_its_end(self._publish(version, f"?{PAUSE_AND_CLEAR}"))

    async def _publish(self, version: WeightVersion, pause_query: str) -> TransferError | None:
        """Return the failure of the last server, if no server is left."""
        async with self._sending:
            failure = await self._update(self._pool, version, pause_query)
            self._are_ranks_ahead = False
        return failure

    async def send_to(self, pool: ServerPool) -> None:
        """Give the servers of another pool the live weights, and keep them there.

        Must be called before the ranks' weights change. Returns when every server of `pool` samples
        from them or is lost. A server that does not answer soon is lost, because the trainer waits.
        """
        await to_its_end(self._send_to(pool))

    async def _send_to(self, pool: ServerPool) -> None:
        async with self._sending:
            assert not self._are_ranks_ahead, "these weights are gone: send before they change"
            members = _members_of(pool)
            await asyncio.gather(*(self._look(member) for member in members))
            # No request is in flight there, so nothing is computed again; what is cached may be of
            # other weights with the same number.
            try:
                await self._update(pool, self._pool.version, f"?{PAUSE_AND_CLEAR}")
            except TransferError as error:
                for member in _remaining(members):
                    self._lose(member, error)

    async def bring_in(self, server: Server) -> None:
        """Update a loading server to the present weights; returns when it serves, or is lost.

        The others are not disturbed. If the ranks' weights are newer than those that the others
        have, it gets them with the next `publish`.
        """
        await self.give(server)
        await server.until(ServerState.SERVING, ServerState.LOST)

    async def give(self, server: Server) -> None:
        """Update a loading server to the present weights, if the ranks still have them."""
        async with self._sending:
            if server.state is ServerState.LOADING and not self._are_ranks_ahead:
                await self._bring_in_alone(Member(server, server.life))

    async def _bring_in_alone(self, member: Member) -> None:
        alone = [member]
        try:
            await self._stage()
            await self._each(alone, PAUSE_PATH, query=self._pause_query, is_repeatable=True)
            await self._until_sent(alone, self._pool.version)
            await self._resume(alone, self._pool.version)
        except RankDiedError:
            return  # it gets the weights of the new ranks, together with the others
        except TransferError as error:
            self._lose(member, error)

    async def _look(self, member: Member) -> None:
        """Mark a server as lost if it shows no sign of life."""
        if not await member.server.client.is_alive(within_s=SIGN_WITHIN_S):
            silent = f"it gave no sign of life for {SIGN_WITHIN_S:g} s"
            self._lose(member, ServerLostError(silent))

    async def _update(
        self, pool: ServerPool, version: WeightVersion, pause_query: str
    ) -> TransferError | None:
        # Before servers pause: what can be done without them is not done while they wait.
        clock = asyncio.get_running_loop()
        begun_s = clock.time()
        await self._stage()
        staged_s = clock.time()
        members = _members_of(pool)
        for member in members:
            # One that is loading gets no requests before it has weights.
            if member.server.state is ServerState.SERVING:
                member.server.become(ServerState.UPDATING)
        # First of all, because the next call takes the weights out of the layers: a forward pass
        # after it would fail or mix two versions.
        await self._each(members, PAUSE_PATH, query=pause_query, is_repeatable=True)
        failure = await self._until_sent(members, version)
        # While the servers are paused: from now on requests carry the new version in their cache
        # salt, so none is answered from keys and values that old weights computed.
        pool.version = version
        await self._resume(members, version)
        _LOGGER.debug(
            "weights %d are live on %d of %d servers: staged in %.3f s, then %.3f s from pause to "
            "resume%s",
            *(version, len(_remaining(members)), len(members), staged_s - begun_s),
            *(clock.time() - staged_s, f"; {failure}" if failure else ""),
        )
        return failure

    async def _resume(self, members: Sequence[Member], version: WeightVersion) -> None:
        await self._each(members, "/resume", is_repeatable=True)
        for member in _remaining(members):
            self._pool_of(member.server).serve(member.server, version)

    def _pool_of(self, server: Server) -> ServerPool:
        return self._pool_by_server[id(server)]

    async def _until_sent(
        self, members: Sequence[Member], version: WeightVersion
    ) -> TransferError | None:
        """Send everything to those of `members` that are not lost meanwhile.

        Returns the failure by which the last one was, if none is left.
        """
        await self._know_headers()

        async def send(remaining: Sequence[Member]) -> None:
            await self._join(remaining)
            await self._send(remaining, version)

        return await self._with_all(members, send)

    async def _stage(self) -> None:
        if self._wire.is_staged:
            await self._ranks.stage_weights(self._wire)

    async def _know_headers(self) -> None:
        # Names, dtypes and shapes stay the same for the whole run, so they are asked for once.
        if not self._headers:
            self._headers = await self._ranks.weight_headers()

    async def _with_all(
        self, members: Sequence[Member], work: Callable[[Sequence[Member]], Awaitable[None]]
    ) -> TransferError | None:
        """Do `work` with the remaining `members`, again from the start after each failure.

        A server that spoils it again and again is lost, although it answers. Returns the failure by
        which the last one was; raises TransferError if it fails and no server is to blame.
        """
        num_tries = 0
        failure: TransferError | None = None
        while remaining := _remaining(members):
            try:
                await work(remaining)
                return None
            except TransferError as error:
                self._group = []
                if len(_remaining(members)) < len(remaining):
                    num_tries, failure = 0, None  # somebody died, which explains it
                    continue
                num_tries += 1
                if isinstance(error, SpoiledError) and num_tries == MOST_SPOILED:
                    self._lose(error.member, error)
                    num_tries, failure = 0, error
                elif num_tries == MOST_TRIES:
                    raise
        return failure

    async def _join(self, members: Sequence[Member]) -> None:
        """Make `members` the receivers; raises TransferError if one of them is lost."""
        if list(members) == self._group:
            return
        self._group = []
        host, port = await self._ranks.meeting_point()
        # Rank 0 is the trainer; the workers of each server come one after another.
        workers = self._wire.workers_per_server
        world_size = 1 + workers * len(members)
        place = Place(wire=self._wire, host=host, port=port, world_size=world_size)
        told = place.as_json()
        join = ControlCall(
            path="/init_weight_transfer_engine",
            own={
                number: {"init_info": {"place": told, "rank_offset": 1 + number * workers}}
                for number in range(len(members))
            },
            # No member's call returns before all others have joined.
            is_collective=True,
            deadline_s=None,
        )
        wait_s = None if self._are_main(members) else OTHERS_WAIT_S
        connecting = self._ranks.connect(place, wait_s=wait_s)
        await self._together(connecting, members, join)
        self._group = list(members)

    async def _send(self, members: Sequence[Member], version: WeightVersion) -> None:
        await self._open(members)
        # A broadcast ends only when every receiver takes part. This call and the ones around it are
        # not repeatable: vLLM refuses to start or finish an update twice.
        path, body = self._receiving()
        # Without a deadline: whoever sends notices when nothing moves any more.
        receive = ControlCall(path=path, body=body, is_collective=True, deadline_s=None)
        begun_s = asyncio.get_running_loop().time()
        sent = await self._together(self._ranks.send_weights(), members, receive)
        _LOGGER.debug(
            "weights %d went to %s in %.3f s, digest %s",
            *(version, ", ".join(one.server.client.base_url for one in members)),
            *(asyncio.get_running_loop().time() - begun_s, sent),
        )
        if self._sends_adapter:
            body = {"new_version": str(version)}
            await self._each(members, "/update_weight_version", body)
        else:
            await self._each(members, "/finish_weight_update", {"weight_version": str(version)})
            self._open_updates.clear()
        await self._compare(members, sent)

    async def _open(self, members: Sequence[Member]) -> None:
        """Prepare servers to receive; raises TransferError if one is lost."""
        if self._sends_adapter:
            return
        # What came before a failure was received by some of them as a whole, and vLLM refuses to
        # begin another update before the end of that one.
        await self._each(list(self._open_updates), "/finish_weight_update")
        self._open_updates = set()
        await self._each(members, "/start_weight_update")
        self._open_updates = set(_remaining(members))
        if len(self._open_updates) < len(members):
            raise TransferError("an inference server was lost before the weights were sent")

    def _receiving(self) -> tuple[str, dict[str, Any]]:
        """Return the call by which a server receives from the ranks."""
        rows = [asdict(header) for header in self._headers]
        info = {
            "names": [row["name"] for row in rows],
            "dtype_names": [row["dtype"] for row in rows],
            "shapes": [row["shape"] for row in rows],
        }
        if self._sends_adapter:
            arguments = {"method": "receive_adapter", "kwargs": {"update_info": info}}
            return "/collective_rpc", arguments
        return "/update_weights", {"update_info": info}

    async def _compare(self, members: Sequence[Member], sent: str) -> None:
        """Mark servers as lost that have received other data than was sent."""
        others: list[Member] = []

        def compare(member: Member, digest: str) -> None:
            if digest != sent and member not in others:
                others.append(member)

        await self._ask(members, "received_digest", compare)
        if not others:
            return
        parts = await self._ranks.sent_digests()

        def explain(member: Member, held: Any) -> None:
            if held != parts:
                found = difference(parts, held)
                error = EndpointError(f"it holds other weights than were sent: {found}")
                self._lose(member, error)

        await self._ask(others, "received_digests", explain)

    async def _ask(
        self, members: Sequence[Member], method: str, hear: Callable[[Member, Any], None]
    ) -> None:
        """Return the answers of all workers of each server; servers without answers are lost."""
        call = ControlCall(
            path="/collective_rpc",
            body={"method": method},
            is_repeatable=True,
            deadline_s=self._deadline_s(members),
        )

        def hear_all(member: Member, answer: Any) -> None:
            for result in answer["results"]:
                hear(member, result)

        await self._called(members, call, hear_all)

    async def _each(
        self,
        members: Sequence[Member],
        path: str,
        body: dict[str, object] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
    ) -> None:
        """Call all remaining `members`; those that fail are lost."""
        call = ControlCall(
            path=path,
            body=body,
            query=query,
            is_repeatable=is_repeatable,
            deadline_s=self._deadline_s(members),
        )
        await self._called(members, call, lambda member, answer: None)

    async def _called(
        self, members: Sequence[Member], call: ControlCall, hear: Callable[[Member, Any], None]
    ) -> None:
        remaining = _remaining(members)

        def note(number: int, answer: Any) -> None:
            if isinstance(answer, EndpointError):
                self._lose(remaining[number], answer)
            else:
                hear(remaining[number], answer)

        await self._call([one.server.client for one in remaining], call, note)

    async def _together(
        self, of_ranks: Awaitable[Any], members: Sequence[Member], call: ControlCall
    ) -> Any:
        """Return the result of the ranks once all members have taken part; dead ones are lost.

        Raises TransferError if the ranks or a living member failed: then another one was gone.
        """
        answers: dict[int, Any] = {}
        # None is cancelled: a transfer cannot be interrupted and has a deadline of its own.
        clients = [member.server.client for member in members]
        calling = asyncio.ensure_future(self._call(clients, call, answers.__setitem__))
        (from_ranks,) = await asyncio.gather(of_ranks, return_exceptions=True)
        # Their waits end when nothing moves any more. Only then time counts for the servers.
        have_failed = isinstance(from_ranks, BaseException)
        limit_s = LEFT_ALONE_S if have_failed else self._deadline_s(members)
        await asyncio.wait([calling], timeout=limit_s)
        if calling.done():
            await calling
        else:
            # Nobody waits for what is still to come of it.
            calling.add_done_callback(lambda done: done.cancelled() or done.exception())
        failures: list[tuple[Member, EndpointError]] = []
        # In the order in which they answered: those that failed first come first.
        late = [number for number in range(len(members)) if number not in answers]
        for number in [*answers, *late]:
            member = members[number]
            answer = answers.get(number, _LEFT_BEHIND if have_failed else _SILENT)
            if isinstance(answer, EndpointError):
                self._open_updates.discard(member)
                is_gone = isinstance(answer, ServerLostError)
                if is_gone or not await member.server.client.is_alive():
                    self._lose(member, answer)
                else:
                    failures.append((member, answer))
        # A rank that dies in an update ends it on the servers too, which are not to blame then.
        if have_failed and not (failures and isinstance(from_ranks, TransferError)):
            raise from_ranks
        if failures:
            told = "; ".join(f"{one.server.client.base_url}: {error}" for one, error in failures)
            raise SpoiledError(told, failures[0][0])
        return from_ranks

    def _are_main(self, members: Sequence[Member]) -> bool:
        """Return whether they belong to the pool for rollouts."""
        return all(self._pool_of(member.server) is self._pool for member in members)

    def _deadline_s(self, members: Sequence[Member]) -> float:
        """Return the longest wait for an answer of `members`, in seconds."""
        return CONTROL_DEADLINE_S if self._are_main(members) else OTHERS_WAIT_S

    def _lose(self, member: Member, error: TelescopeError) -> None:
        self._pool_of(member.server).lose(member.server, str(error), life=member.life)


async def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, which continues when this is canceled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # Nobody waits for its failure any more.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


def _members_of(pool: ServerPool) -> list[Member]:
    return [Member(one, one.life) for one in pool.servers if one.takes_weights]


def _remaining(members: Sequence[Member]) -> list[Member]:
    return [member for member in members if member.is_left]
