"""The frames of the token plane: many generations over one WebSocket, columns instead of objects.

A client's frame is a list of requests and cancellations, and a server's frame is a list of
replies. Everything that became ready since the last frame travels together, so a thousand short
rollouts cost only a few frames. Token ids are columns of little-endian int32 and log-probs are
columns of float32; neither is ever a list.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

TOKEN_PLANE_PATH = "/telescope/v1/tokens"
PAUSE_PATH = "/telescope/v1/pause"
"""Does what vLLM's `/pause?mode=` does, without its sleep of 20 ms after the engine has paused."""
MAX_FRAME_BYTES = 256 * 2**20
"""Largest frame that the client accepts from a server; aiohttp's own limit is 4 MiB."""

Item = TypeVar("Item")


class TokenRequest(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A request for one continuation of `prompt_ids`."""

    id: int
    """Chosen by the client, unique on its connection."""
    prompt_ids: bytes
    """[P] int32 column."""
    sampling: msgspec.Raw
    """vLLM's sampling parameters as a MessagePack map; equal maps are decoded only once."""
    cache_salt: str
    """Requests share cached prefixes only with requests that have the same salt."""
    priority: int
    """Requests with a lower priority are scheduled first."""


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop request `id` and free its slot. It gets no reply; unknown ids are ignored."""

    id: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens from `start` on were sampled under weight version `version`."""

    version: str
    """A number, or `default` before the first weight update."""
    start: int
    """Index of the first of these tokens in the completion."""


class TokenReply(msgspec.Struct, frozen=True, array_like=True):
    """The result of one request."""

    id: int
    token_ids: bytes = b""
    """[T] int32 column."""
    logprobs: bytes = b""
    """[T] float32 column, nats: log-probs under the distribution that was sampled from."""
    finish_reason: str = ""
    """`stop`, `length`, `abort` or `error`; empty if the request was refused."""
    versions: tuple[VersionSpan, ...] = ()
    """In the order of the tokens."""
    error: str = ""
    """Why the request failed; the columns are empty then."""


ClientFrame = list[TokenRequest | CancelRequest]
ServerFrame = list[TokenReply]


def column(typecode: str, content: bytes) -> "array[int] | array[float]":
    """Return `content` as an array of `typecode` ('i' or 'f')."""
    values = array(typecode)
    values.frombytes(content)
    return values


class Outbox(Generic[Item]):
    """Collects items, and sends those that have gathered as one frame, in the order they came."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[None]]) -> None:
        self._send = send
        self._items: list[Item] = []
        self._has_items = asyncio.Event()

    def put(self, item: Item) -> None:
        """Send `item` with the next frame."""
        self._items.append(item)
        self._has_items.set()

    async def run(self) -> None:
        """Send frames until cancelled, or until `send` raises."""
        while True:
            await self._has_items.wait()
            # Nothing is awaited between clearing the event and taking the items, so an item that
            # is put during the send sets the event again and goes out with the next frame.
            self._has_items.clear()
            items, self._items = self._items, []
            await self._send(items)
