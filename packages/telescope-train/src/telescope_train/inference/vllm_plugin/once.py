"""`Once`: run a server's control calls only once, however often they are repeated.

A call that must not run twice, such as the start of a weight update, carries a number. A caller
without an answer sends the same number again, and gets the answer of the first call.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from telescope_train.inference.wire import ONCE_HEADER

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

MOST_REMEMBERED = 64
"""Most calls whose answers are kept. A caller repeats within seconds, one call at a time."""
_HEADER = ONCE_HEADER.encode()


class Once:
    """An ASGI application: `app`, with numbered calls that run only once."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._calls: OrderedDict[bytes, asyncio.Task[Sequence[Message]]] = OrderedDict()

    @property
    def is_making_calls(self) -> bool:
        """Whether a numbered call is running."""
        return not all(call.done() for call in self._calls.values())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        number = dict(scope["headers"]).get(_HEADER) if scope["type"] == "http" else None
        if number is None:
            await self._app(scope, receive, send)
            return
        if number not in self._calls:
            body = await _body(receive)
            if body is None:
                return  # it was not sent as a whole, and nothing was done
            # Nothing is awaited from the second look on, so the call is begun once.
            if number not in self._calls:
                # A task of its own: the call goes on if the connection of the caller ends.
                self._calls[number] = asyncio.create_task(self._made(scope, body))
                self._forget()
        for message in await asyncio.shield(self._calls[number]):
            await send(message)

    async def _made(self, scope: Message, body: bytes) -> Sequence[Message]:
        """Run the call; returns the messages that the application sends."""
        sent: list[Message] = []
        asked = [body]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()  # a caller that never leaves
            return {"type": "http.request", "body": asked.pop(), "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return sent

    def _forget(self) -> None:
        done = [number for number, call in self._calls.items() if call.done()]
        for number in done[: max(0, len(self._calls) - MOST_REMEMBERED)]:
            del self._calls[number]


async def _body(receive: Receive) -> bytes | None:
    """Return the request's body; None if the caller disconnects before its end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body
