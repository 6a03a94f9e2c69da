"""One control call to many servers, such as a part of a weight update."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telescope_core.base.errors import EndpointError
from telescope_train.inference.servers import CONTROL_DEADLINE_S, ServerClient

MOST_AT_ONCE = 256
"""Servers that are called at once: each call has its own task and connection."""

OnAnswer = Callable[[int, Any], None]
"""Called with the index of a server among those called, and its answer or EndpointError."""


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
