"""The host's side of one worker: its requests, the policies of its rollouts, and its health.

The policy stays in this process. A worker asks for completions over the wire and gets messages,
never token ids or log-probs. This side records each completion as a turn of the rollout.
"""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from telescope_core.base.errors import (
    EndpointError,
    EnvironmentProcessError,
    RolloutCrashError,
    StrayCancelError,
    TelescopeError,
)
from telescope_core.base.number_text import counted
from telescope_core.base.protocols import (
    LATE_SCORE_S,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    PlayRequest,
    Policy,
)
from telescope_core.base.retries import as_cancelled, as_failed
from telescope_core.base.scoring_events import Listener, who_hears_of_scoring
from telescope_core.base.terminal import foreign
from telescope_core.base.types import LOST_TO, Completion, Rollout, StopReason, Turn
from telescope_core.chat.trouble import SHOWN_EVERY_S, relay
from telescope_core.environments.author_errors import stray_cancel
from telescope_core.playing.in_process import stray_cancelled
from telescope_core.processes import frames
from telescope_core.processes.frames import Beat, Connection, ProtocolError, Request, WorkerFrame
from telescope_core.processes.handshake import Agreement, hello, load_error
from telescope_core.processes.launch import Lifeline, RemotePlace, WorkerPlace
from telescope_core.processes.replies import (
    MOST_ERROR_CHARACTERS,
    Reader,
    UnreadableReplyError,
    read_nothing,
    read_rollout,
)
from telescope_core.processes.settings import StageDeadlines

T = TypeVar("T")
_GROWN_BYTES = 2**20
"""Growth in memory that counts as work, as of a worker that loads something."""
_DONE_BYTES = 4096
"""Bytes read or written between two beats that count as work by themselves."""
_DECODER: msgspec.msgpack.Decoder[WorkerFrame] = msgspec.msgpack.Decoder(WorkerFrame)
_SURELY_BLOCKED_S = 2.0
"""Seconds for which code must have blocked a worker before it is ended at a rollout's deadline."""
_MOST_LINE_CHARACTERS = 500
"""Longest line of a worker that is shown to a person."""


class RequestFailed(Exception):
    """The worker answered a request with a failure."""

    def __init__(self, failure: frames.Failure) -> None:
        self.kind = foreign(failure.kind, _MOST_LINE_CHARACTERS)
        self.text = foreign(failure.message, MOST_ERROR_CHARACTERS)
        super().__init__(f"{self.kind}: {self.text}")


@dataclass(slots=True, eq=False)
class _Call:
    """One request in flight. Its caller awaits `ended`, which the worker's reply sets."""

    id: int
    ended: "asyncio.Future[msgspec.Raw | None]"
    """The value of the reply; None when the worker stopped the request after a Cancel."""
    rollout_id: str = ""
    ends_s: float = math.inf
    """Its deadline on the clock of the event loop; only a rollout has one."""
    policy: Policy | None = None
    on_scoring: Listener | None = None
    """Called when the rollout begins to be scored."""
    turns: list[Turn] = field(default_factory=list[Turn])
    completing: dict[int, "asyncio.Task[Completion]"] = field(
        default_factory=dict[int, "asyncio.Task[Completion]"]
    )
    is_stopped: bool = False
    """Whether this side asked the worker to stop the rollout."""
    blame: str = ""
    """Error text if this rollout is the reason for ending its worker; else empty."""

    def withdraw_all(self) -> None:
        """Cancel the model requests of this rollout, which frees their slots at once."""
        for task in self.completing.values():
            task.cancel()


class WorkerClient:
    """The connection to one worker, from its greeting to its end."""

    def __init__(self, place: WorkerPlace, agreement: Agreement, deadlines: StageDeadlines) -> None:
        self.label = place.label
        self.is_retired = False
        """Whether it only finishes its current requests and receives no new ones."""
        self.has_group_rewards = True
        self.num_finished = 0
        self.how_ended = ""
        """Error text, set when the worker ended while requests were waiting for it."""
        self.last_beat: Beat | None = None
        self.lag_s = 0.0
        """Longest event loop lag in seconds since this value was last read and reset."""
        self.lifeline: Lifeline | None = None
        self.suspects: frozenset[str] = frozenset()
        """Ids of the rollouts of which one may be the reason for its end, if it is not known
        which."""
        self.culprit = ""
        """Id of the rollout, or name of another request, that is the reason for its end; empty =
        none."""
        self._place = place
        self._deadlines = deadlines
        self._agreement = agreement
        self._calls: dict[int, _Call] = {}
        self._completing: dict[int, asyncio.Task[Completion]] = {}
        self._ids = itertools.count()
        self._heard_s = time.monotonic()
        self._moved_s = asyncio.get_running_loop().time()
        """Time at which the worker last showed work, on the clock of the event loop."""
        self._most_memory_bytes = 0
        self._greeting: asyncio.Future[frames.Welcome] = asyncio.get_running_loop().create_future()
        self._burial: asyncio.Task[None] | None = None
        self._why_killed = ""
        self._told_s, self._num_untold = -math.inf, 0
        """Time at which its trouble was last shown, and the number of lines left out since then."""
        self._connection: Connection[WorkerFrame] = Connection(
            _DECODER, on_frame=self._on_frame, on_lost=self._on_lost
        )

    @property
    def is_alive(self) -> bool:
        """Whether requests can be sent."""
        return self._connection.is_open and not self._why_killed

    @property
    def why_replaced(self) -> str:
        """One line with the reason for its end, without the last lines of its output."""
        line = (self.how_ended or f"{self.label} is retired").partition("; its last lines")[0]
        if self._why_killed:
            # How the process then ended is this side's doing.
            line = f"{self.label} {self._why_killed}"
        return " ".join(line.split())

    @property
    def load(self) -> int:
        """Number of requests in flight."""
        return len(self._calls)

    @property
    def quiet_s(self) -> float:
        """Seconds since the worker last sent anything."""
        return time.monotonic() - self._heard_s

    @property
    def playing(self) -> list[str]:
        """Ids of its rollouts; rollouts that do not wait for their policy come first."""
        calls = [call for call in self._calls.values() if call.rollout_id]
        return [call.rollout_id for call in sorted(calls, key=lambda one: bool(one.completing))]

    async def start(self, settings: Mapping[str, Any], *, asks_models: bool = True) -> None:
        """Start the worker and open its environment; raises a TelescopeError if that fails."""
        self._agreement.begin()
        start_s, greeting_s = self._deadlines.start_s, self._deadlines.greeting_s
        has_started = isinstance(self._place, RemotePlace)
        try:
            self.lifeline = await self._place.start(self._connection, silence_s=start_s)
            self._connection.send(hello(self._agreement.identity, self._place.token))
            welcome = await self._worked_on(
                self._greeting,
                "its start",
                greeting_s if has_started else start_s,
                shows_work=not has_started,
            )
        except TimeoutError:
            why = f"did not send its greeting, and showed no work for {start_s:g} s"
            if has_started:
                why = (
                    f"took the connection and sent no greeting within {greeting_s:g} s: what "
                    "listens there does not speak as a worker, or is blocked; check the address, "
                    "and check that a worker was started there with --listen"
                )
            self.kill(why)
            raise EnvironmentProcessError(f"{self.label} {self._why_killed}") from None
        if not PROTOCOL_MIN <= welcome.protocol <= PROTOCOL_MAX:
            its_version = foreign(welcome.core_version, _MOST_LINE_CHARACTERS)
            raise ProtocolError(
                f"{self.label} answered in protocol {welcome.protocol} (telescope-core "
                f"{its_version}), but this side supports protocols {PROTOCOL_MIN} to "
                f"{PROTOCOL_MAX}; use the same version of telescope-core on both sides"
            )
        self.label = f"{self.label} (pid {welcome.pid})"
        self.has_group_rewards = welcome.has_group_rewards
        names = self._agreement.accept(welcome, gets_secrets=self._place.gets_secrets)
        values = {name: os.environ[name] for name in names if name in os.environ}
        if values:
            self.lifeline.hide(values.values())
        opening = frames.Open(settings=dict(settings), secrets=values, asks_models=asks_models)
        await self.ask(opening, read_nothing, within_s=self._deadlines.load_s, shows_work=True)

    async def ask(
        self,
        request: Request,
        read: "Reader[T]",
        *,
        within_s: float,
        shows_work: bool = False,
    ) -> T:
        """Send a request other than a rollout and return its value.

        It may take `within_s` seconds; with `shows_work`, that is the limit for a time without a
        sign of work. Raises the environment's error, or EnvironmentProcessError if no answer comes.
        """
        call, what = self._begin(request), type(request).__name__.lower()
        try:
            value = await self._worked_on(call.ended, what, within_s, shows_work=shows_work)
        except TimeoutError:
            idle = f"was idle for {within_s:g} s in it" if shows_work else f"had {within_s:g} s"
            self.kill(f"did not answer {what} and {idle}")
            raise EnvironmentProcessError(f"{self.label} {self._why_killed}") from None
        except RequestFailed as error:
            raise load_error(error.kind, error.text) from None
        except EnvironmentProcessError:
            if call.blame:
                raise RolloutCrashError(call.blame.partition(": ")[2]) from None
            raise
        except asyncio.CancelledError:
            self._connection.send(frames.Cancel(id=call.id))
            raise
        finally:
            self._calls.pop(call.id, None)
        if value is None:
            raise StrayCancelError(f"{self.label}, {what}: {stray_cancel('')}")
        try:
            return read(value)
        except UnreadableReplyError as error:
            raise EnvironmentProcessError(self._unreadable(what, error)) from None

    async def _worked_on(
        self, result: "asyncio.Future[T]", what: str, within_s: float, *, shows_work: bool
    ) -> T:
        """Return the worker's answer to a request; raises TimeoutError if it takes too long."""
        clock = asyncio.get_running_loop()
        begun_s = told_s = clock.time()
        while True:
            since_s = max(begun_s, self._moved_s) if shows_work else begun_s
            left_s = since_s + within_s - clock.time()
            if left_s <= 0:
                raise TimeoutError
            now_s = clock.time()
            if shows_work and now_s - told_s >= within_s:
                told_s = now_s
                relay(f"{self.label} has worked on {what} for {now_s - begun_s:.0f} s")
            await asyncio.wait([result], timeout=left_s)
            if result.done():
                return result.result()

    async def play(self, name: str, request: PlayRequest, policy: Policy) -> Rollout:
        """Play one rollout; a failure is returned as a failed rollout."""
        hears = who_hears_of_scoring()
        frame = frames.Play(
            request=request, endpoint=policy.endpoint, tells_scoring=hears is not None
        )
        late_s = LATE_SCORE_S if request.scores_at_deadline else 0.0
        limit_s = request.deadline_s + late_s + self._deadlines.grace_s
        call = self._begin(frame, rollout_id=request.rollout_id, policy=policy)
        call.ends_s = asyncio.get_running_loop().time() + request.deadline_s
        call.on_scoring = hears
        try:
            async with asyncio.timeout(limit_s):
                # Shielded, because after a cancellation `ended` still tells when the worker stops.
                value = await asyncio.shield(call.ended)
        except TimeoutError:
            await self._stop(call)
            text = (
                f"rollout {request.rollout_id} did not end within its deadline of "
                f"{request.deadline_s:g} s plus {limit_s - request.deadline_s:g} s; "
                f"{self.label} is replaced"
            )
            self.is_retired = True
            return _failed(name, request, call, f"TimeoutError: {text}", StopReason.TIMEOUT)
        except RequestFailed as error:
            return _failed(name, request, call, str(error), StopReason.ERROR)
        except EnvironmentProcessError as error:
            if call.blame:
                is_late = call.blame.startswith(TimeoutError.__name__)
                reason = StopReason.TIMEOUT if is_late else StopReason.ERROR
                return _failed(name, request, call, call.blame, reason)
            text = f"{type(error).__name__}: {error}"
            lost = _failed(name, request, call, text, StopReason.ERROR)
            if self.culprit:
                lost = replace(lost, tags={**lost.tags, LOST_TO: self.culprit})
            return lost
        except asyncio.CancelledError:
            await self._stop(call)
            raise
        finally:
            self._calls.pop(call.id, None)
            call.withdraw_all()
        self.num_finished += 1
        if value is None and call.is_stopped:
            return as_cancelled(replace(request.rollout(name), turns=tuple(call.turns)))
        if value is None:
            stray = stray_cancelled(name, request)
            return replace(stray, turns=tuple(call.turns))
        try:
            rollout = read_rollout(value)
        except UnreadableReplyError as error:
            text = f"{type(error).__name__}: {name}: {self._unreadable('play', error)}"
            return _failed(name, request, call, text, StopReason.ERROR)
        return replace(
            rollout,
            environment=name,
            group_id=request.group_id,
            index=request.index,
            turns=tuple(call.turns) or rollout.turns,
        )

    def cancel(self, rollout_id: str) -> None:
        """Stop a rollout; its `play` returns a cancelled rollout."""
        for call in self._calls.values():
            if call.rollout_id == rollout_id:
                call.is_stopped = True
                call.withdraw_all()
                self._connection.send(frames.Cancel(id=call.id))

    def blame(self, call_id: int, error: str) -> str:
        """Record that a request is the reason for ending this worker; returns the `culprit`."""
        call = self._calls.get(call_id)
        if call is not None:
            call.blame = error
            self.culprit = call.rollout_id or "a request that is no rollout"
        return self.culprit

    def is_overdue(self, beat: Beat) -> bool:
        """Return whether code that blocks the worker does so beyond its rollout's deadline.

        A rollout that is scored at its deadline has `LATE_SCORE_S` more. If several rollouts may be
        the reason, each keeps its own limit.
        """
        if beat.blocked_s < _SURELY_BLOCKED_S:
            return False
        now_s = asyncio.get_running_loop().time()
        named = self._calls.get(beat.blocked_call)
        suspects = [named] if named is not None else self._not_waiting()
        ends_s = max((call.ends_s for call in suspects), default=math.inf)
        is_late = now_s - beat.blocked_s > ends_s
        return now_s > ends_s + (LATE_SCORE_S if is_late else 0.0)

    def _not_waiting(self) -> list[_Call]:
        """Return the rollouts whose code may be running: those that wait for no policy answer."""
        calls = self._calls.values()
        return [call for call in calls if call.rollout_id and not call.completing]

    def kill(self, why: str) -> None:
        """End the worker now; its requests fail with its label followed by `why`."""
        self._why_killed = self._why_killed or why
        if self.lifeline is not None:
            self.lifeline.kill()
        self._connection.abort(why)

    async def close(self) -> None:
        """End the worker in an orderly way, or by force after `close_s` seconds. Idempotent."""
        close_s = self._deadlines.close_s
        if self.is_alive and self._greeting.done():
            with suppress(TelescopeError):  # the worker is ended below in any case
                await self.ask(frames.Close(), read_nothing, within_s=close_s)
        self._connection.close("it was closed")
        if self.lifeline is not None:
            await self.lifeline.end(within_s=close_s)
        if self._burial is not None:
            await self._burial

    def _unreadable(self, what: str, error: UnreadableReplyError) -> str:
        """Retire this worker because of an unreadable reply; returns the text about the reply.

        It has answered, so this is no death of a worker that cannot be kept alive.
        """
        self.is_retired = True
        self.num_finished += 1
        return (
            f"{self.label} sent a reply to {what} that cannot be read ({error}); the worker is "
            "replaced; look for code of the environment that writes to the worker's descriptors, "
            "or use the same version of telescope-core on both sides"
        )

    def _begin(
        self, frame: Request, *, rollout_id: str = "", policy: Policy | None = None
    ) -> _Call:
        if not self.is_alive:
            raise EnvironmentProcessError(f"{self.label} {self._why_killed or 'has ended'}")
        frame.id = next(self._ids)
        ended = asyncio.get_running_loop().create_future()
        call = _Call(id=frame.id, ended=ended, rollout_id=rollout_id, policy=policy)
        self._connection.send(frame)
        self._calls[frame.id] = call
        return call

    async def _stop(self, call: _Call) -> None:
        """Cancel a rollout: its model requests now, its code in the worker within `cancel_s`."""
        call.withdraw_all()
        self._connection.send(frames.Cancel(id=call.id))
        await asyncio.wait(
            [*call.completing.values(), call.ended], timeout=self._deadlines.cancel_s
        )
        if call.ended.done():
            call.ended.exception()
        else:
            self.is_retired = True

    def _on_frame(self, frame: WorkerFrame) -> None:
        self._heard_s = time.monotonic()
        match frame:
            case Beat():
                self._note_work(frame)
                self.last_beat = frame
                if frame.ended_by >= 0:
                    self._note_end(frame)
                if frame.trouble:
                    self._tell(frame.trouble)
                self.lag_s = max(self.lag_s, frame.lag_s)
            case frames.Welcome() | frames.Refused():
                self._greeted(frame)
            case frames.Complete():
                self._complete(frame)
            case frames.Scoring():
                call = self._calls.get(frame.id)
                if call is not None and call.on_scoring is not None:
                    call.on_scoring()
            case frames.Withdraw():
                task = self._completing.get(frame.id)
                if task is not None:
                    task.cancel()
            case _:
                self._end(frame)

    def _tell(self, trouble: str) -> None:
        """Show a line about the worker's trouble, unless another one was shown just before."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._told_s + SHOWN_EVERY_S:
            self._num_untold += 1
            return
        line = foreign(
            " ".join(trouble[: 4 * _MOST_LINE_CHARACTERS].split()), _MOST_LINE_CHARACTERS
        )
        before = f" ({self._num_untold} lines before it were left out)" if self._num_untold else ""
        self._told_s, self._num_untold = now_s, 0
        relay(f"{self.label}: {line}{before}")

    def _note_end(self, beat: Beat) -> None:
        where = foreign(beat.blocked_where, _MOST_LINE_CHARACTERS) or "its code"
        self.blame(
            beat.ended_by,
            f"{RolloutCrashError.__name__}: {where} ended the process that ran it, as os._exit and "
            "crashes of native code do; look at the last lines of the environment's log",
        )
        if self.culprit:
            self._why_killed = f"was ended by {where}, for {self.culprit}"

    def _note_work(self, beat: Beat) -> None:
        """Record when the worker last read or wrote data, or used more memory than ever before.

        Computing alone does not count, because code in an endless loop computes, too. With several
        requests, it is not known which of them the work is for.
        """
        before = self.last_beat
        grown_bytes = beat.memory_bytes - self._most_memory_bytes
        done_bytes = beat.io_bytes - before.io_bytes if before is not None else 0
        if grown_bytes >= _GROWN_BYTES:
            self._most_memory_bytes = beat.memory_bytes
        elif done_bytes < _DONE_BYTES:
            return
        if self.load <= 1:
            self._moved_s = asyncio.get_running_loop().time()

    def _greeted(self, frame: frames.Welcome | frames.Refused) -> None:
        if self._greeting.done():
            self._connection.abort("a second greeting arrived")
        elif isinstance(frame, frames.Welcome):
            self._greeting.set_result(frame)
        else:
            text = f"{self.label} refused: {foreign(frame.reason, MOST_ERROR_CHARACTERS)}"
            self._greeting.set_exception(load_error(frame.kind, text))

    def _end(self, frame: frames.Reply | frames.Stopped | frames.Failure) -> None:
        call = self._calls.get(frame.id)
        if call is None or call.ended.done():
            return
        if isinstance(frame, frames.Failure):
            call.ended.set_exception(RequestFailed(frame))
        else:
            call.ended.set_result(frame.value if isinstance(frame, frames.Reply) else None)

    def _complete(self, frame: frames.Complete) -> None:
        call = self._calls.get(frame.call)
        if call is None or call.policy is None or call.ended.done():
            text = "the rollout has ended"
            self._connection.send(frames.Failure(id=frame.id, kind="EndpointError", message=text))
            return
        if frame.id in self._completing:
            self._connection.abort(f"a second request for completion {frame.id} arrived")
            return
        started_s = time.monotonic()
        task = asyncio.get_running_loop().create_task(
            call.policy.complete(frame.messages, frame.sampling, tools=frame.tools)
        )
        call.completing[frame.id] = self._completing[frame.id] = task
        task.add_done_callback(lambda done: self._completed(call, frame.id, done, started_s))

    def _completed(
        self, call: _Call, number: int, task: "asyncio.Task[Completion]", started_s: float
    ) -> None:
        call.completing.pop(number, None)
        self._completing.pop(number, None)
        # Code in the worker that ignores a cancellation must not wait forever.
        stopped = EndpointError("the rollout was cancelled") if task.cancelled() else None
        error = stopped or task.exception()
        if error is None:
            turn = Turn(completion=task.result(), started_s=started_s, ended_s=time.monotonic())
            error = self._show(turn.completion, number)
            call.turns.append(turn)
        if error is not None:
            kind, text = type(error).__name__, str(error)
            self._connection.send(frames.Failure(id=number, kind=kind, message=text))

    def _show(self, completion: Completion, number: int) -> ProtocolError | None:
        """Send the worker its part of a completion; returns the error if that is too large."""
        shown = Completion(
            message=completion.message,
            finish_reason=completion.finish_reason,
            num_prompt_tokens=completion.num_prompt_tokens,
            num_completion_tokens=completion.num_completion_tokens,
            is_counted=completion.is_counted,
            num_retries=completion.num_retries,
        )
        try:
            self._connection.send(frames.Completed(id=number, completion=shown))
        except ProtocolError as error:
            return error
        return None

    def _on_lost(self, why: str) -> None:
        for call in self._calls.values():
            call.withdraw_all()
        if self.lifeline is not None:
            self.lifeline.kill()
        if self._calls or not self._greeting.done():
            self._burial = asyncio.get_running_loop().create_task(self._bury(why))

    async def _bury(self, why: str) -> None:
        """Fail every waiting request with the end of the worker and the last lines of its log."""
        reason = self._why_killed or f"is gone: {why}"
        if not self.culprit:
            self.suspects = frozenset(call.rollout_id for call in self._not_waiting())
        rollouts = self.playing
        lost = f"; {counted(len(rollouts), 'rollout')} lost with it" if rollouts else ""
        how = f"; {await self.lifeline.epitaph()}" if self.lifeline is not None else ""
        error = EnvironmentProcessError(f"{self.label} {reason}{lost}{how}")
        self.how_ended = str(error)
        for ended in [self._greeting, *(call.ended for call in self._calls.values())]:
            if not ended.done():
                ended.set_exception(error)
        if not self._greeting.cancelled():
            self._greeting.exception()


def _failed(
    name: str, request: PlayRequest, call: _Call, error: str, stop_reason: StopReason
) -> Rollout:
    tags = {"failed_in": "process"}
    rollout = replace(request.rollout(name), turns=tuple(call.turns), tags=tags)
    return as_failed(rollout, error, stop_reason)
