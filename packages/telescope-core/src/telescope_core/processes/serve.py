"""The worker's side of a connection: answers one host's requests with an environment.

Each request is a task. The policy of a rollout is on the host: its requests are sent over the wire,
and cancelling one withdraws it on the host.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from telescope_core.base.errors import EndpointError, EnvironmentLoadError, StrayCancelError
from telescope_core.base.retries import message_with_notes
from telescope_core.base.scoring_events import hearing_of_scoring
from telescope_core.base.secret_names import secret_values
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    Message,
    Rollout,
    Sampling,
    Tools,
)
from telescope_core.environments import running
from telescope_core.environments.author_errors import contained, stray_cancel
from telescope_core.environments.base import Environment
from telescope_core.environments.building import class_location
from telescope_core.playing.in_process import InProcessEnvironment
from telescope_core.processes import frames
from telescope_core.processes.frames import Connection, HostFrame, ProtocolError, Request
from telescope_core.processes.handshake import Identity, error_from, objection, welcome
from telescope_core.records.logs import hide_in_logs

_LOGGER = logging.getLogger(__name__)

_DECODER: msgspec.msgpack.Decoder[HostFrame] = msgspec.msgpack.Decoder(HostFrame)


@dataclass(slots=True, eq=False)
class ServedCall:
    """A request that this process is answering."""

    owner: "Serving"
    id: int
    has_ended: bool = False


_LEAVING: set[asyncio.Task[None]] = set()
"""Held, because the event loop holds tasks weakly."""
CALL: ContextVar[ServedCall | None] = ContextVar("CALL", default=None)
"""The request that the running code belongs to, in tasks and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The environment that a worker serves."""

    identity: Identity
    environment_class: type[Environment] | None
    problem: tuple[str, str] = ("", "")
    """Class name and message of the error that prevents serving; it is sent to every host."""
    token: str
    build: Callable[[Callable[[], Environment]], Awaitable[Environment]] = asyncio.to_thread
    """Function that calls the builder of the environment, whose constructor may load data, off the
    event loop: in a worker, on the main thread."""
    notes: running.Notes | None = None
    """Memory in which calls of the environment's code are noted; None = no process watches."""


class Serving:
    """The connection to one host."""

    def __init__(self, served: Served, *, on_ended: Callable[["Serving"], None]) -> None:
        self.connection: Connection[HostFrame] = Connection(
            _DECODER,
            on_frame=self._on_frame,
            on_lost=self._on_lost,
            max_frame_bytes=frames.MAX_HELLO_BYTES,
        )
        self._served = served
        self._on_ended = on_ended
        self._is_greeted = False
        self._client: InProcessEnvironment | None = None
        self._tasks: dict[int, asyncio.Task[object]] = {}
        self.completions: dict[int, asyncio.Future[Completion]] = {}
        """Answers that policies wait for, by the number of their request."""
        self.ids = itertools.count()

    def beat(self, beat: frames.Beat, *, blocked_by: ServedCall | None) -> None:
        """Send the host the state of this process; called from a thread."""
        if not self._is_greeted:
            return
        if blocked_by is not None and blocked_by.owner is self:
            beat = msgspec.structs.replace(beat, blocked_call=blocked_by.id)
        self.connection.send_from_thread(beat)

    def _on_frame(self, frame: HostFrame) -> None:
        if not self._is_greeted:
            self._greet(frame)
        elif isinstance(frame, frames.Completed):
            answered = self.completions.pop(frame.id, None)
            if answered is not None and not answered.done():
                answered.set_result(frame.completion)
        elif isinstance(frame, frames.Failure):
            answered = self.completions.pop(frame.id, None)
            if answered is not None and not answered.done():
                error = error_from(frame.kind, frame.message, otherwise=EndpointError)
                answered.set_exception(error)
        elif isinstance(frame, frames.Cancel):
            task = self._tasks.get(frame.id)
            if task is not None:
                task.cancel()
        elif isinstance(frame, frames.Hello):
            self.connection.abort("a second hello arrived")
        else:
            self._begin(frame)

    def _greet(self, frame: HostFrame) -> None:
        if not isinstance(frame, frames.Hello):
            self.connection.abort("the first message must be hello")
            return
        kind, reason = "ProtocolError", objection(frame, self._served.identity, self._served.token)
        environment_class = self._served.environment_class
        if not reason and environment_class is None:
            kind, reason = self._served.problem
        if reason or environment_class is None:
            self.connection.send(frames.Refused(kind=kind, reason=reason))
            self.connection.close("the host was refused")
            return
        self._is_greeted = True
        self.connection.max_frame_bytes = frames.MAX_FRAME_BYTES
        identity = self._served.identity
        self.connection.send(welcome(frame, identity, environment_class, os.getpid()))

    def _begin(self, request: Request) -> None:
        call = ServedCall(self, request.id)
        # The task and the threads it starts copy the current context.
        notes = self._served.notes
        context = copy_context()
        context.run(CALL.set, call)
        if notes is not None:
            context.run(running.CURRENT.set, running.Request(notes, request.id))
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(
            self._answer(request), context=context
        )
        self._tasks[request.id] = task
        task.add_done_callback(lambda ended: self._reply(call, ended))

    def _reply(self, call: ServedCall, task: asyncio.Task[object]) -> None:
        call.has_ended = True
        self._tasks.pop(call.id, None)
        if task.cancelled() and task.cancelling():
            self.connection.send(frames.Stopped(id=call.id))
            return
        error = StrayCancelError(stray_cancel("")) if task.cancelled() else task.exception()
        if error is None:
            try:
                self.connection.send(frames.Reply(id=call.id, value=frames.as_raw(task.result())))
                return
            except (TypeError, ValueError, OverflowError, ProtocolError) as unsendable:
                found = self._served.environment_class
                where = f"{class_location(found)}: " if found is not None else ""
                error = EnvironmentLoadError(f"{where}its result cannot be sent: {unsendable}")
        kind, text = type(error).__name__, message_with_notes(error)
        self.connection.send(frames.Failure(id=call.id, kind=kind, message=text))

    async def _answer(self, request: Request) -> object:
        with contained():
            return await self._answered(request)

    async def _answered(self, request: Request) -> object:
        if isinstance(request, frames.Open):
            return await self._open(request)
        client = self._client
        if client is None:
            raise EndpointError(f"{type(request).__name__} came before the environment was opened")
        match request:
            case frames.Play():
                return await self._play(client, request)
            case frames.Describe():
                return await client.describe()
            case frames.FetchExample():
                return await client.example(request.split, request.index)
            case frames.Gold():
                gold = await client.gold(request.split, request.index)
                return None if gold is None else frames.without_tokens(gold)
            case frames.ScoreGroup():
                group = request.group
                return await client.score_group(request.split, request.example_index, group)
            case frames.Health():
                return await client.health()
            case frames.Close():
                await client.close()
                self._client = None
                asyncio.get_running_loop().call_soon(self.connection.close, "the host closed it")
                return None

    async def _open(self, request: frames.Open) -> None:
        found = self._served.environment_class
        assert found is not None, "a greeted host has an environment"
        os.environ.update(request.secrets)
        hide_in_logs({*request.secrets.values(), *secret_values(request.settings)})
        environment = await self._served.build(partial(found.from_settings, request.settings))
        identity = self._served.identity
        self._client = InProcessEnvironment(
            environment,
            name=identity.name,
            version=identity.version,
            asks_models=request.asks_models,
        )

    async def _play(self, client: InProcessEnvironment, request: frames.Play) -> Rollout:
        policy = _HostPolicy(self, request.id, request.endpoint)
        asked = request.request
        _LOGGER.debug("rollout %s of example %s begins", asked.rollout_id, asked.example_index)
        with hearing_of_scoring(partial(self._note_scoring, request)):
            rollout = await client.play(asked, policy)
        _LOGGER.debug(
            "rollout %s is %s with reward %s after %d turns",
            *(asked.rollout_id, rollout.status.value, rollout.reward, policy.num_answers),
        )
        # The host has recorded the turns of its policy.
        return replace(rollout, turns=()) if policy.num_answers else frames.without_tokens(rollout)

    def _note_scoring(self, request: frames.Play) -> None:
        if request.tells_scoring:
            self.connection.send(frames.Scoring(id=request.id))

    def _on_lost(self, why: str) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        _LEAVING.add(leaving := asyncio.get_running_loop().create_task(self._leave()))
        leaving.add_done_callback(_LEAVING.discard)
        self._on_ended(self)

    async def _leave(self) -> None:
        """Close the environment of a host that is gone without having closed it."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        if self._client is not None:
            await self._client.close()


class _HostPolicy:
    """The policy of one rollout, which sends each request to the host."""

    def __init__(self, serving: Serving, call: int, endpoint: ChatEndpoint | None) -> None:
        self._serving = serving
        self._call = call
        self.endpoint = endpoint
        self.num_answers = 0

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, tools: Tools = ()
    ) -> Completion:
        send, answers = self._serving.connection.send, self._serving.completions
        number = next(self._serving.ids)
        answers[number] = asyncio.get_running_loop().create_future()
        send(
            frames.Complete(
                id=number,
                call=self._call,
                messages=tuple(messages),
                sampling=sampling,
                tools=tuple(tools),
            )
        )
        try:
            completion = await answers[number]
        except asyncio.CancelledError:
            send(frames.Withdraw(id=number))
            raise
        finally:
            answers.pop(number, None)
        self.num_answers += 1
        return completion
