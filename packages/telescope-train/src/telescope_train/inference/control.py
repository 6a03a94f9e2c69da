"""One control call to many servers, such as a part of a weight update."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telescope_core.base.errors import EndpointError
from telescope_train.inference.servers import CONTROL_DEADLINE_S, ServerClient

MOST_AT_ONCE = 256
"""Servers that are called at the same time: each call has a task and a connection of its own."""

OnAnswer = Callable[[int, Any], None]
"""Gets the number of a server among those called, and its answer or the EndpointError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """A call that every server gets."""

    path: str
    body: dict[str, Any] | None = None
    own: Mapping[int, dict[str, Any]] | None = None
    """Bodies of single servers, by their number; None = `body` is that of all."""
    query: str = ""
    is_repeatable: bool = False
    """Whether two calls have the same effect as one."""
    deadline_s: float | None = CONTROL_DEADLINE_S
    """Longest that a server may take; None = until it is lost."""
    is_collective: bool = False
    """Whether no server answers before all are called: then they are called at the same time."""

    def body_of(self, number: int) -> dict[str, Any] | None:
        """Return the body of the call to server `number`."""
        return self.body if self.own is None else self.own[number]


class CallServers(Protocol):
    """Calls servers; `call_servers`, and what stands for it in a simulation."""

    def __call__(
        self, clients: Sequence[ServerClient], call: ControlCall, on_answer: OnAnswer
    ) -> Awaitable[None]:
        """Make `call` to all of `clients`; returns when each has answered or failed."""
        ...


async def call_servers(
    clients: Sequence[ServerClient], call: ControlCall, on_answer: OnAnswer
) -> None:
    """Make `call` to all of `clients`; `on_answer` hears each of them as soon as it answers."""
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
