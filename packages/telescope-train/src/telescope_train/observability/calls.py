"""Each request to a server as a row of `calls/`: its rollout, its server, and its times."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from telescope_core.base import clock
from telescope_core.base.types import WeightVersion
from telescope_core.records.timeline import ModelCall
from telescope_train.observability.traces import Traces, traced_group


class ServerTiming(msgspec.Struct, frozen=True, array_like=True):
    """The division of a request's time, as its server measured it; sent over the wire."""

    queue_s: float
    """Seconds in the server's queue."""
    first_token_s: float
    """From its arrival to its first token."""
    prefill_s: float
    """From its start on the engine to its first token."""
    decode_s: float
    """From its first token to its last."""
    num_cached_tokens: int
    """Prompt tokens that the server found in its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """A request to one server that has ended, with or without an answer."""

    server: str
    """Its address."""
    version: WeightVersion
    """Version of the weights for its first token, or the live one when it was sent."""
    sent_s: float
    """On the clock of the event loop."""
    ended_s: float
    """On the clock of the event loop."""
    num_prompt_tokens: int
    num_completion_tokens: int = 0
    timing: ServerTiming | None = None
    error: str = ""
    """The reason why there is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """Callbacks for a model call on its way."""

    on_sent: Callable[[str, WeightVersion], None] = lambda server, version: None
    """Called with the address of each server that it goes to, and the live weights."""
    on_end: Callable[[CallEnd], None] = lambda end: None
    """Called with the outcome at each of them."""
    traceparent: str = ""
    """Trace context for servers; empty = none."""


UNWATCHED = Watching()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The attempt of a model call, and its number there."""

    environment: str
    group_id: str
    index: int
    attempt: int
    call: int
    """1 = the first of its attempt."""
    step: int | None
    """None for an eval."""


class CallLog:
    """Records calls. `add` must be quick, and must not fail."""

    def __init__(self, add: Callable[[ModelCall], None], traces: Traces | None = None) -> None:
        """`traces`: used to derive the trace of each call; None = servers keep no traces."""
        self._add = add
        self._traces = traces

    def watching(
        self,
        caller: Caller,
        on_sent: Callable[[str, WeightVersion], None] = UNWATCHED.on_sent,
    ) -> Watching:
        """Return the callbacks that record a model call."""
        traceparent = ""
        if self._traces is not None:
            group = traced_group(caller.environment, caller.group_id, step=caller.step)
            traceparent = self._traces.traceparent(group, caller.index, caller.attempt, caller.call)
        return Watching(
            on_sent=on_sent, on_end=partial(self.ended, caller), traceparent=traceparent
        )

    def ended(self, caller: Caller, end: CallEnd) -> None:
        """Record the end of a request."""
        self._add(
            ModelCall(
                time_s=clock.at(end.sent_s),
                duration_s=end.ended_s - end.sent_s,
                server=end.server,
                environment=caller.environment,
                group_id=caller.group_id,
                index=caller.index,
                attempt=caller.attempt,
                call=caller.call,
                step=caller.step,
                version=end.version,
                **({} if end.timing is None else msgspec.structs.asdict(end.timing)),
                num_prompt_tokens=end.num_prompt_tokens,
                num_completion_tokens=end.num_completion_tokens,
                error=end.error,
            )
        )


UNRECORDED_CALLS = CallLog(lambda call: None)
"""For servers outside of a run, such as simulated ones."""
