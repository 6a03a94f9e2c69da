"""The frames of the token plane: many generations over one WebSocket, columns instead of objects.

A client's frame is a list of requests and cancellations, and a server's frame is a list of
replies. Everything that became ready since the last frame travels together, in frames of bounded
size: one that is too large for its receiver would close the connection, and fail every request on
it. Token ids are columns of little-endian int32, log-probs of float32; neither is ever a list.
"""

import asyncio
import secrets
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from telescope_core.base.chains import Routes
from telescope_core.base.errors import ConfigError
from telescope_train.observability.calls import ServerTiming

PROGRESS_S = 0.5
"""Seconds after which the tokens that a request has so far are sent, so that they are not lost with
the server. A shorter request has one reply."""
WEIGHT_ENGINE = "telescope"
"""vLLM's name for our engine of weight transfers."""
TOKEN_PLANE_PATH = "/telescope/v1/tokens"
ENGINE_PATH = "/telescope/v1/engine"
"""Answers between two steps of the engine, at once while weights are changed, and with 503 if the
engine is dead. No answer means that a step does not end, or that the server itself hangs."""
ONCE_HEADER = "x-telescope-once"
"""The number of a control call that is to be made once. A second call with the same number gets the
answer of the first."""
SECRET_VARIABLE = "TELESCOPE_SERVER_SECRET"
"""Environment variable of a server with the secret of its requests; empty = none."""
_SHORTEST_SECRET = 16
IDENTITY_VARIABLE = "TELESCOPE_SERVER_IDENTITY"
"""Environment variable of a server with the identity of this start."""
SOCKET_VARIABLE = "TELESCOPE_SERVER_SOCKET"
"""Environment variable of a server with the descriptor of its listening socket."""
LIVES_PATH = "/telescope/lives/"
"""`/telescope/lives/IDENTITY/PATH` is PATH of the server with that identity. Any other server of
Telescope answers 421 there, and other programs do not know it: an answer proves whose it is."""
OTHER_SERVER_STATUS = 421
"""HTTP's "misdirected request", which vLLM never answers."""
PAUSE_PATH = "/telescope/v1/pause"
"""Stops the engine between two steps and keeps its requests, until `/resume`. vLLM's own `/pause`
sleeps for 20 ms after the engine has paused, and always drops the caches."""
PAUSE_AND_CLEAR = "cache=clear"
"""Query that drops all caches, so that running requests compute their prefix again."""
PAUSE_AND_KEEP = "cache=keep"
"""Query that keeps the cached prefixes of running requests."""
PAUSE_AND_ABORT = "requests=abort"
"""Query that drops all caches and ends running requests, which keep their tokens."""
PAUSE_QUERIES = (PAUSE_AND_CLEAR, PAUSE_AND_KEEP, PAUSE_AND_ABORT)
SLEEP_PATHS = ("/sleep", "/wake_up", "/is_sleeping")
"""vLLM's routes for sleep, refused by servers without it."""
FRAME_BYTES = 4 * 2**20
"""Size limit of a frame, except for a single item that is larger."""
MAX_FRAME_BYTES = 256 * 2**20
"""Largest frame that either end accepts: a prompt or an answer of 32 million tokens."""
_ITEM_OVERHEAD_BYTES = 64
"""Upper limit for the numbers, tags and lengths of an item on the wire."""


def secret_headers(secret: str) -> dict[str, str]:
    """Return the headers that show `secret`; none if it is empty."""
    return {"authorization": f"Bearer {secret}"} if secret else {}


def root_of(base_url: str, identity: str) -> str:
    """Return the prefix of all URLs of one start of a server; `identity` empty = any."""
    return f"{base_url}{LIVES_PATH}{identity}" if identity else base_url


class SizedItem(Protocol):
    """An item for an outbox."""

    @property
    def num_bytes(self) -> int:
        """Upper limit of its size on the wire, in bytes."""
        ...


Item = TypeVar("Item", bound=SizedItem)


class TokenRequest(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A request for one continuation of `prompt_ids`."""

    id: int
    """Id chosen by the client, unique on its connection."""
    prompt_ids: bytes
    """[P] int32 column."""
    sampling: msgspec.Raw
    """vLLM's sampling parameters as a MessagePack map; equal maps are decoded only once."""
    cache_salt: str
    """Salt; requests share cached prefixes only with those of the same salt."""
    priority: int
    """Requests with a lower priority are scheduled first."""
    traceparent: str = ""
    """The W3C trace that the request belongs to; empty = none."""

    @property
    def num_bytes(self) -> int:
        """Upper limit of its size on the wire, in bytes."""
        salt_bytes = 4 * len(self.cache_salt)
        sampling_bytes = len(bytes(self.sampling))
        text_bytes = salt_bytes + len(self.traceparent)
        return len(self.prompt_ids) + sampling_bytes + text_bytes + _ITEM_OVERHEAD_BYTES


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop request `id` and free its slot. There is no reply; unknown ids are ignored."""

    id: int

    @property
    def num_bytes(self) -> int:
        """Upper limit of its size on the wire, in bytes."""
        return _ITEM_OVERHEAD_BYTES


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens from `start` on were sampled with weight version `version`."""

    version: str
    """A number, or `default` before the first weight update."""
    start: int
    """Index of the first of these tokens in the completion."""


class TokenReply(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request; the last reply ends it."""

    id: int
    token_ids: bytes = b""
    """[T] int32 column."""
    logprobs: bytes = b""
    """[T] float32 column, nats: log-probs under the distribution that was sampled from."""
    finish_reason: str = ""
    """`stop`, `length`, `abort` or `error`; empty if it continues, or was refused."""
    versions: tuple[VersionSpan, ...] = ()
    """For all tokens so far, in order."""
    error: str = ""
    """Reason for the failure of the request; the columns are then empty."""
    is_dead: bool = False
    """Whether it failed because the engine is dead, as all others will."""
    timing: ServerTiming | None = None
    """In the last reply."""
    routes: Routes | None = None
    """In the last reply, if the server was asked for them."""

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return bool(self.finish_reason or self.error)

    @property
    def num_bytes(self) -> int:
        """Upper limit of its size on the wire, in bytes."""
        columns_bytes = len(self.token_ids) + len(self.logprobs) + 4 * len(self.error)
        columns_bytes += 0 if self.routes is None else self.routes.num_bytes
        return columns_bytes + (2 + len(self.versions)) * _ITEM_OVERHEAD_BYTES


ClientFrame = list[TokenRequest | CancelRequest]
ServerFrame = list[TokenReply]


def routes_of(experts_TLK: Any) -> Routes | None:
    """Return vLLM's routes as [T, layers, chosen] of small unsigned integers, or None."""
    if experts_TLK is None:
        return None
    _, num_layers, num_chosen = experts_TLK.shape
    content = experts_TLK.astype("<i2").tobytes()
    return Routes(experts=content, num_layers=num_layers, num_chosen=num_chosen)


def column(typecode: str, content: bytes) -> "array[int] | array[float]":
    """Return `content` as an array of `typecode` ('i' or 'f')."""
    values = array(typecode)
    values.frombytes(content)
    return values


def frames(items: Sequence[Item], *, max_bytes: int = FRAME_BYTES) -> Iterator[list[Item]]:
    """Split `items` into frames of at most `max_bytes`, in their order.

    A larger item gets a frame to itself.
    """
    frame: list[Item] = []
    frame_bytes = 0
    for item in items:
        if frame and frame_bytes + item.num_bytes > max_bytes:
            yield frame
            frame, frame_bytes = [], 0
        frame.append(item)
        frame_bytes += item.num_bytes
    if frame:
        yield frame


class Outbox(Generic[Item]):
    """Collects items, and sends those that have accumulated together, in order."""

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
            for frame in frames(items):
                await self._send(frame)


def server_secret(environ: Mapping[str, str]) -> str:
    """Return the secret for the servers of a run: a new one, or the one in the settings.

    Raises ConfigError for one that could be guessed.
    """
    if problems := secret_problems(environ):
        raise ConfigError("\n".join(problems))
    return environ.get(SECRET_VARIABLE) or secrets.token_urlsafe(32)


def secret_problems(environ: Mapping[str, str]) -> list[str]:
    """Return why the secret in the settings is none."""
    chosen = environ.get(SECRET_VARIABLE, "")
    if not chosen or len(chosen) >= _SHORTEST_SECRET:
        return []
    return [
        f"{SECRET_VARIABLE} must hold at least {_SHORTEST_SECRET} characters, got {len(chosen)}; "
        "leave it out for a new secret with each run"
    ]
