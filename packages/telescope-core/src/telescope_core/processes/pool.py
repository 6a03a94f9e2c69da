"""`EnvironmentPool`: an EnvironmentClient over worker processes, here or on other machines.

A rollout goes to the least busy worker. A worker that dies, hangs or uses too much memory is ended
and replaced. Only its own rollouts come back as failures, with `EnvironmentProcessError`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from telescope_core.base.errors import ConfigError, ContradictionError, EnvironmentProcessError
from telescope_core.base.protocols import PlayRequest, Policy
from telescope_core.base.terminal import foreign
from telescope_core.base.types import EnvironmentDescription, Example, Group, Rollout, Split
from telescope_core.processes.client import WorkerClient
from telescope_core.processes.frames import (
    Beat,
    Describe,
    FetchExample,
    Gold,
    Health,
    Request,
    ScoreGroup,
    without_tokens,
)
from telescope_core.processes.handshake import Agreement, Identity
from telescope_core.processes.launch import WorkerPlace
from telescope_core.processes.replies import (
    Reader,
    read_description,
    read_example,
    read_gold,
    read_group_of,
    read_nothing,
)
from telescope_core.processes.settings import ProcessSettings

T = TypeVar("T")
_AWAIT = "await it, or run it in a thread"
_BOUND = (
    'declare it @runs_in("process"), which ends it alone, or bound what it computes: the length of '
    "a text that a pattern reads, the size of a number"
)
_MOST_WHERE_CHARACTERS = 300
_LOOK_EVERY_S = 0.25
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_ASK_ATTEMPTS = 3
"""Attempts at a request other than a rollout; it has no side effects, so it is repeated when a
worker dies."""


@dataclass(slots=True, eq=False)
class _Seat:
    """One slot of the pool, which holds one worker after another."""

    place: WorkerPlace
    worker: WorkerClient | None = None
    starting: "asyncio.Task[None] | None" = None
    num_deaths: int = 0
    """Deaths in a row without a finished rollout."""
    last_error: str = ""
    """Error of the last failed start."""
    fallen: WorkerClient | None = None
    """The last worker that had started and then ended or was retired."""

    @property
    def last_words(self) -> str:
        """The reason why this slot has no worker."""
        return self.last_error or (self.fallen.how_ended if self.fallen else "")


class EnvironmentPool:
    """The workers of one environment, which start with the first request.

    The pool belongs to the event loop of that request. One task checks the workers at regular
    intervals and ends those that hang or use too much memory.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[WorkerPlace],
        settings: Mapping[str, Any],
        *,
        identity: Identity,
        processes: ProcessSettings,
        secrets: Sequence[str] | None = None,
    ) -> None:
        """`secrets`: names of the variables that the record of the environment says it reads.

        None = there is no record. Local workers then get those in the first one's greeting.
        """
        self.agreement = Agreement(identity, secrets)
        self.name = name
        """The id that the environment was opened with."""
        self._settings = settings
        self._processes = processes
        self._seats = [_Seat(place) for place in places]
        self._leaving: list[WorkerClient] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._description: EnvironmentDescription | None = None
        self._num_restarts = 0
        self._num_finished = 0
        self._measured = (time.monotonic(), 0)
        self._is_closed = False
        self._suspects: set[str] = set()
        """Rollouts of which one may be the reason for a worker's end: each is played alone in a
        worker."""
        self._alone = asyncio.Lock()
        self._reserved: WorkerClient | None = None
        """The worker that is reserved for playing a suspect alone; it gets no other requests."""
        self._unreserved = asyncio.Event()
        self.on_replaced: Callable[[str], None] = lambda why: None
        """Called with the reason when a worker is replaced; must be quick, and must not fail."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of this machine's variables that its workers may read, as far as they are known."""
        return self.agreement.secrets or ()

    def tell_secrets(self, tell: Callable[[tuple[str, ...]], object]) -> None:
        """Call `tell` with the names of its secrets, if it has any, before a worker gets them."""
        self.agreement.tell = tell

    async def describe(self) -> EnvironmentDescription:
        """Return what the environment declares."""
        description = self._description
        if description is None:
            load_s = self._processes.deadlines.load_s
            description = await self._ask(Describe(), read_description, within_s=load_s)
            self.agreement.require_described(description)
            self._description = description
        return description

    async def example(self, split: Split, index: int) -> Example:
        """Return one example."""
        load_s = self._processes.deadlines.load_s
        return await self._ask(
            FetchExample(split=split, index=index),
            read_example,
            within_s=load_s,
        )

    async def gold(self, split: Split, index: int) -> Rollout | None:
        """Return the scored rollout of the gold answer; None when there is none."""
        deadlines = self._processes.deadlines
        return await self._ask(
            Gold(split=split, index=index),
            read_gold,
            within_s=deadlines.load_s + deadlines.score_s,
        )

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play and score one rollout on the least busy worker.

        Raises EnvironmentProcessError only when no worker can be kept alive.
        """
        if request.rollout_id in self._suspects:
            return await self._play_alone(request, policy)
        worker = await self._least_busy()
        rollout = await worker.play(self.name, request, policy)
        self._num_finished += 1
        if rollout.is_lost and request.rollout_id in worker.suspects:
            self._suspects.add(request.rollout_id)
        return rollout

    async def _play_alone(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play a rollout that may have ended its worker in a worker without other rollouts."""
        async with self._alone:
            try:
                worker = await self._emptied()
                rollout = await worker.play(self.name, request, policy)
            finally:
                self._reserved = None
                self._unreserved.set()
        self._num_finished += 1
        if rollout.is_lost:
            # Nothing is wrong with workers as such, however often this rollout ends one.
            worker.culprit = worker.culprit or request.rollout_id
        else:
            self._suspects.discard(request.rollout_id)
        return rollout

    async def _emptied(self) -> WorkerClient:
        """Return a worker that plays nothing, and gets nothing until it is unreserved."""
        while True:
            worker = self._reserved = await self._least_busy()
            self._unreserved.clear()
            while worker.is_alive and not worker.is_retired:
                if not worker.load:
                    return worker
                await asyncio.sleep(_LOOK_EVERY_S)
            self._reserved = None

    async def score_group(self, split: Split, example_index: int, group: Group) -> Group:
        """Return `group` with its group rewards; token ids and log-probs are not sent."""
        if not (await self._least_busy()).has_group_rewards:
            return group
        sent = Group(
            id=group.id,
            environment=group.environment,
            example_id=group.example_id,
            rollouts=tuple(without_tokens(rollout) for rollout in group.rollouts),
        )
        return await self._ask(
            ScoreGroup(split=split, example_index=example_index, group=sent),
            read_group_of(group),
            within_s=self._processes.deadlines.score_s,
        )

    async def cancel(self, rollout_id: str) -> None:
        """Stop a rollout; unknown ids are ignored."""
        for worker in self._workers():
            worker.cancel(rollout_id)

    async def health(self) -> None:
        """Return once every worker answers; raises EnvironmentProcessError when one does not."""
        await self._least_busy()
        hang_s = self._processes.deadlines.hang_s
        await asyncio.gather(
            *(
                worker.ask(Health(), read_nothing, within_s=hang_s)
                for worker in self._workers()
                if worker.is_alive
            )
        )

    def stats(self) -> dict[str, float]:
        """Return statistics of the workers; rates and lag cover the time since the last call."""
        workers = [seat.worker for seat in self._seats if seat.worker and seat.worker.is_alive]
        beats = [worker.last_beat for worker in workers if worker.last_beat is not None]
        now_s, (before_s, num_before) = time.monotonic(), self._measured
        self._measured = (now_s, self._num_finished)
        lag_s = max((worker.lag_s for worker in workers), default=0.0)
        for worker in workers:
            worker.lag_s = 0.0
        return {
            "workers": float(len(workers)),
            "restarts": float(self._num_restarts),
            "in_flight": float(sum(worker.load for worker in workers)),
            "rollouts_per_s": (self._num_finished - num_before) / max(1e-3, now_s - before_s),
            "loop_lag_s": lag_s,
            "memory_bytes": float(max((beat.memory_bytes for beat in beats), default=0)),
            "stuck_threads": float(sum(beat.num_stuck_threads for beat in beats)),
        }

    async def close(self) -> None:
        """End every worker and everything it started. Idempotent."""
        self._require_own_loop()
        self._is_closed = True
        for seat in self._seats:
            # Nothing was asked since it ended, so that nobody has been told.
            if seat.worker is not None and seat.worker.how_ended:
                self.on_replaced(seat.worker.why_replaced)
                seat.worker = None
        tasks = [seat.starting for seat in self._seats if seat.starting is not None]
        if self._watcher is not None:
            tasks.append(self._watcher)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(worker.close() for worker in self._workers()), *self._closing)
        for seat in self._seats:
            seat.worker = None
        self._leaving.clear()

    def _workers(self) -> list[WorkerClient]:
        return [seat.worker for seat in self._seats if seat.worker is not None] + self._leaving

    async def _ask(self, request: Request, read: "Reader[T]", *, within_s: float) -> T:
        """Send a request to any worker, and to another one when that worker dies.

        A death with a known, unrelated cause is not counted.
        """
        num_failed = 0
        while True:
            worker = await self._least_busy()
            try:
                return await worker.ask(request, read, within_s=within_s, shows_work=True)
            except EnvironmentProcessError:
                num_failed += not worker.culprit
                if num_failed == _ASK_ATTEMPTS:
                    raise

    async def _least_busy(self) -> WorkerClient:
        """Return the least busy worker; waits for one to start when there is none."""
        self._require_own_loop()
        while True:
            if self._is_closed:
                raise EnvironmentProcessError(f"the workers of {self.name} are closed")
            if self._watcher is None:
                self._watcher = asyncio.create_task(self._watch())
            for seat in self._seats:
                self._fill(seat)
            ready = [seat.worker for seat in self._seats if seat.worker and seat.starting is None]
            free = [worker for worker in ready if worker is not self._reserved]
            if free:
                return min(free, key=lambda worker: worker.load)
            if ready:
                await self._unreserved.wait()
                continue
            starting = [seat.starting for seat in self._seats if seat.starting is not None]
            if not starting:
                raise EnvironmentProcessError(
                    f"no worker of {self.name} can be kept alive; gave up after "
                    f"{self._processes.max_restarts + 1} attempts in a row. The last error: "
                    f"{self._seats[0].last_words}"
                )
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
            for task in starting:
                if task.done() and not task.cancelled():
                    task.result()

    def _require_own_loop(self) -> None:
        loop = self._watcher.get_loop() if self._watcher is not None else None
        if loop not in (None, asyncio.get_running_loop()):
            raise ConfigError(
                f"the workers of {self.name} belong to the event loop of their first request, and "
                "this is another one; use and close the environment within one asyncio.run, or "
                "open it again"
            )

    def _fill(self, seat: _Seat) -> None:
        """Ensure that `seat` has a worker or that one is being started."""
        worker = seat.worker
        if worker is not None and seat.starting is None:
            if worker.is_alive and not worker.is_retired:
                return
            seat.worker, seat.fallen, seat.last_error = None, worker, ""
            self._leaving.append(worker)
            self._num_restarts += 1
            self.on_replaced(worker.why_replaced)
            if worker.num_finished:
                seat.num_deaths = 0
            elif not worker.culprit:
                seat.num_deaths += 1
        if seat.starting is None and seat.num_deaths <= self._processes.max_restarts:
            seat.starting = asyncio.create_task(self._start(seat))
            seat.starting.add_done_callback(lambda task: _has_started(seat, task))

    async def _start(self, seat: _Seat) -> None:
        """Start a worker in `seat`; raises only errors that another attempt would repeat."""
        if seat.num_deaths:
            pause_s = _FIRST_PAUSE_S * 2 ** (seat.num_deaths - 1)
            await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        worker = WorkerClient(seat.place, self.agreement, self._processes.deadlines)
        try:
            await worker.start(self._settings, asks_models=self._processes.asks_models)
        except ContradictionError:
            await worker.close()
            raise
        except EnvironmentProcessError as error:
            seat.num_deaths += 1
            seat.last_error = str(error)
            await worker.close()
        except BaseException:
            await worker.close()
            raise
        else:
            seat.worker = worker

    async def _watch(self) -> None:
        """End workers that hang or use too much memory, and idle retired ones; never returns."""
        while True:
            # If this loop was blocked, the loop reads what arrived meanwhile before a timer fires.
            await asyncio.sleep(_LOOK_EVERY_S)
            for worker in self._workers():
                if worker.is_alive:
                    self._judge(worker)
            for worker in list(self._leaving):
                if not worker.is_alive or worker.load == 0:
                    self._leaving.remove(worker)
                    closing = asyncio.create_task(worker.close())
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)

    def _judge(self, worker: WorkerClient) -> None:
        limit_bytes, hang_s = self._processes.memory_limit_bytes, self._processes.deadlines.hang_s
        beat = worker.last_beat
        quiet_s = worker.quiet_s
        if beat is not None and beat.is_held and not beat.blocked_where:
            quiet_s = max(quiet_s, beat.blocked_s)
        if quiet_s > hang_s:
            worker.kill(
                f"sent nothing for {quiet_s:.0f} s: its process is stopped, or library code "
                f"blocks it; it was playing {_listed(worker.playing)}"
            )
            return
        if beat is None:
            return
        if beat.blocked_s > hang_s or worker.is_overdue(beat):
            self._end_blocked(worker, beat)
        elif limit_bytes is not None and beat.memory_bytes > limit_bytes:
            worker.kill(
                f"used {beat.memory_bytes / 2**20:.0f} MiB of memory, above its limit of "
                f"{limit_bytes / 2**20:.0f} MiB, while it was playing {_listed(worker.playing)}; "
                "raise the limit, or lower the concurrency"
            )
        elif beat.num_stuck_threads > self._processes.max_stuck_threads:
            worker.is_retired = True

    def _end_blocked(self, worker: WorkerClient, beat: Beat) -> None:
        at = foreign(beat.blocked_where, _MOST_WHERE_CHARACTERS)
        where, advice = f"code at {at} has blocked its event loop for", _AWAIT
        if beat.is_held:
            where = f"{at} has held the interpreter, and with it every other rollout there, for"
            advice = _BOUND
            if not at:
                where = "code that is not known has held the interpreter for"
        where = f"{where} {beat.blocked_s:.0f} s"
        culprit = worker.blame(beat.blocked_call, f"TimeoutError: {where}; {advice}")
        by = f" in rollout {culprit}" if culprit else ""
        worker.kill(f"hangs{by}: {where}")


def _has_started(seat: _Seat, task: "asyncio.Task[None]") -> None:
    seat.starting = None
    if not task.cancelled():
        task.exception()  # marks it as retrieved; `_least_busy` raises it


def _listed(rollout_ids: list[str]) -> str:
    shown = ", ".join(rollout_ids[:5]) or "nothing"
    return f"{shown} and {len(rollout_ids) - 5} more" if len(rollout_ids) > 5 else shown
