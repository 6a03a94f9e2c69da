"""The frames of the token plane: many generations over one WebSocket, columns instead of objects.

A client's frame is a list of requests and of cancellations, a server's frame a list of replies.
Whatever became ready since the last frame travels together, so that a thousand short rollouts
cost a few frames. Token ids are little-endian int32 and log-probs float32 columns, never lists.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

TOKEN_PLANE_PATH = "/telescope/v1/tokens"
PAUSE_PATH = "/telescope/v1/pause"
"""Like vLLM's `/pause?mode=`, which sleeps 20 ms after the engine has paused."""
MAX_FRAME_BYTES = 256 * 2**20

Item = TypeVar("Item")


class TokenRequest(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Continue `prompt_ids` once."""

    id: int
    """Chosen by the client, unique on its connection."""
    prompt_ids: bytes
    sampling: msgspec.Raw
    """vLLM's sampling parameters as a MessagePack map; equal ones are decoded once."""
    cache_salt: str
    priority: int
    """Lower goes first."""


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop request `id` and free its place; it gets no reply. Unknown ids are ignored."""

    id: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens from `start` on were sampled under weight version `version`."""

    version: str
    start: int


class TokenReply(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request."""

    id: int
    token_ids: bytes = b""
    logprobs: bytes = b""
    """Nats, one per token, of the distribution sampled from."""
    finish_reason: str = ""
    versions: tuple[VersionSpan, ...] = ()
    error: str = ""
    """What went wrong; the columns are empty then."""


ClientFrame = list[TokenRequest | CancelRequest]
ServerFrame = list[TokenReply]


def column(typecode: str, content: bytes) -> "array[int] | array[float]":
    """Return `content` as an array of `typecode` ('i' or 'f')."""
    values = array(typecode)
    values.frombytes(content)
    return values


class Outbox(Generic[Item]):
    """Collects items and sends what has gathered as one frame, in order, from a task of its own."""

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
            self._has_items.clear()
            items, self._items = self._items, []
            await self._send(items)
