"""The frames of the environment protocol, and a `Connection` that sends and decodes them.

A frame is a four-byte big-endian length and a msgpack array that begins with the kind of frame.
Types of core are sent as maps by field name, so that a field that one side does not know is
ignored. `docs/reference/environment-protocol.md` describes the exchange.
"""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec

from telescope_core.base.errors import TelescopeError
from telescope_core.base.open_files import is_ready
from telescope_core.base.protocols import PlayRequest
from telescope_core.base.terminal import foreign, whole_strings
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    Group,
    JsonValue,
    Message,
    Rollout,
    Sampling,
    Split,
)

MAX_FRAME_BYTES = 512 * 2**20
"""Largest frame, in bytes: a rollout with all of its pictures, or a group of them, is one."""
MAX_HELLO_BYTES = 64 * 2**10
"""Largest frame, in bytes, that is accepted before the host has shown its token."""
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A time in seconds reported by a worker; NaN is refused."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
UNNUMBERED = -1
"""Id of a request that has not been sent."""


class ProtocolError(TelescopeError):
    """The other side broke the protocol, or uses another version of it."""

    exit_code = 6


class _Frame(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """One message; the tag is its kind."""


class Hello(_Frame, tag="hello"):
    """Host, first: identifies the host, and the environment that it expects."""

    protocol_min: int
    protocol_max: int
    core_version: str
    token: str
    """Empty over an inherited socket, which no other process can use."""
    environment: str
    """The name that the environment was opened with; empty = any."""
    environment_version: str
    """Empty = any."""


class Welcome(_Frame, tag="welcome"):
    """Worker: the host is accepted; names the environment and the secrets its code may read."""

    protocol: int
    core_version: str
    environment: str
    environment_version: str
    pid: int
    secrets: tuple[str, ...]
    has_group_rewards: bool
    """Whether score_group would change anything."""


class Refused(_Frame, tag="refused"):
    """Worker: the host is refused, and why; then the worker closes the connection."""

    kind: str
    """Name of the exception class."""
    reason: str


class Open(_Frame, tag="open"):
    """Host, request: build the environment with these settings."""

    settings: dict[str, Any]
    secrets: dict[str, str]
    """Values of declared secrets, by name; empty for a worker on another machine."""
    id: int = UNNUMBERED
    asks_models: bool = True
    """Whether the environment may ask judges and simulated users."""


class Describe(_Frame, tag="describe"):
    """Host, request: asks for an EnvironmentDescription."""

    id: int = UNNUMBERED


class FetchExample(_Frame, tag="example"):
    """Host, request: asks for one Example."""

    split: Split
    index: int
    id: int = UNNUMBERED


class Gold(_Frame, tag="gold"):
    """Host, request: asks for the scored Rollout of a gold answer, or nil when there is none."""

    split: Split
    index: int
    id: int = UNNUMBERED


class Play(_Frame, tag="play"):
    """Host, request: asks for one Rollout, without turns, because the host has recorded them."""

    request: PlayRequest
    endpoint: ChatEndpoint | None
    id: int = UNNUMBERED
    tells_scoring: bool = False
    """Whether the worker sends Scoring; hosts of earlier versions do not know that frame."""


class ScoreGroup(_Frame, tag="score_group"):
    """Host, request: asks for the Group with its group rewards applied."""

    split: Split
    example_index: int
    group: Group
    id: int = UNNUMBERED


class Health(_Frame, tag="health"):
    """Host, request: answered with nil as soon as the event loop gets to it."""

    id: int = UNNUMBERED


class Cancel(_Frame, tag="cancel"):
    """Host: stop request `id`, which is answered with Stopped unless it has already ended."""

    id: int


class Close(_Frame, tag="close"):
    """Host, request: release everything; answered with nil, then the worker disconnects."""

    id: int = UNNUMBERED


class Reply(_Frame, tag="reply"):
    """Worker: request `id` has succeeded."""

    id: int
    value: msgspec.Raw


class Failure(_Frame, tag="failure"):
    """Either side: request or completion `id` has failed."""

    id: int
    kind: str
    """Name of the exception class."""
    message: str


class Stopped(_Frame, tag="stopped"):
    """Worker: request `id` was cancelled and has ended."""

    id: int


class Scoring(_Frame, tag="scoring"):
    """Worker: play request `id` has been played, and its rewards begin to be computed."""

    id: int


class Complete(_Frame, tag="complete"):
    """Worker, request: asks for a completion from the policy of play request `call`."""

    id: int
    call: int
    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[dict[str, JsonValue], ...]


class Completed(_Frame, tag="completed"):
    """Host: the policy's answer to Complete `id`, without token ids and log-probs."""

    id: int
    completion: Completion


class Withdraw(_Frame, tag="withdraw"):
    """Worker: the answer to Complete `id` is no longer needed."""

    id: int


class Beat(_Frame, tag="beat"):
    """Worker, twice a second, from a thread: the state of its process."""

    lag_s: Amount = 0.0
    """Longest delay of the event loop since the last beat, in seconds."""
    blocked_s: Amount = 0.0
    """Seconds for which the event loop has been blocked until now; 0 = it is not blocked."""
    blocked_call: int = -1
    """Id of the play request whose code blocks the loop; -1 = none, or not known."""
    blocked_where: str = ""
    """`file:line in function` of that code."""
    memory_bytes: Count = 0
    """Resident memory of the process."""
    num_stuck_threads: Count = 0
    """Threads that still run code of rollouts that have ended."""
    io_bytes: Count = 0
    """Bytes that the process has read and written since its start; 0 = not known."""
    trouble: str = ""
    """Trouble since the last beat with endpoints that the environment's own code asks."""
    is_held: bool = False
    """Whether the whole interpreter has been blocked for `blocked_s` seconds; then the worker's
    supervisor sends the beat."""
    ended_by: int = -1
    """Id of the request whose code has ended the process; in the supervisor's last beat."""


HostFrame: TypeAlias = (
    Hello
    | Open
    | Describe
    | FetchExample
    | Gold
    | Play
    | ScoreGroup
    | Health
    | Cancel
    | Close
    | Completed
    | Failure
)
"""Frames that a host sends."""
WorkerFrame: TypeAlias = (
    Welcome | Refused | Reply | Failure | Stopped | Scoring | Complete | Withdraw | Beat
)
"""Frames that a worker sends."""
Request: TypeAlias = Open | Describe | FetchExample | Gold | Play | ScoreGroup | Health | Close


def _plain(value: Any) -> object:
    """Convert a number or array of another library to a plain Python value, or raise TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r} of type {type(value).__name__} is not plain data")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def to_bytes(frame: HostFrame | WorkerFrame) -> bytes:
    """Encode `frame` with its length in front; raises ProtocolError when it is too large."""
    # What a policy is asked must not change on the way.
    body = _ENCODER.encode(frame) if isinstance(frame, Complete) else _encoded(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(frame).__name__.lower()} message of {len(body)} bytes exceeds the "
            f"{MAX_FRAME_BYTES} bytes of the environment protocol; keep large data out of "
            "conversations, Example.info and rollouts, or play in this process "
            "(env_isolation = none)"
        )
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes | bytearray | memoryview) -> int:
    """Return the length in bytes of the body that follows `header`."""
    return _LENGTH.unpack(header)[0]


def as_raw(value: object) -> msgspec.Raw:
    """Encode the value of a Reply."""
    return msgspec.Raw(_encoded(value))


def _encoded(value: object) -> bytes:
    """Encode `value`; half of a surrogate pair, which UTF-8 lacks, is written as an escape."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain)
        return _ENCODER.encode(whole_strings(plain))


def without_tokens(rollout: Rollout) -> Rollout:
    """Return `rollout` without token ids and log-probs, which a worker must not see or invent."""
    turns = (
        replace(turn, completion=replace(turn.completion, tokens=None)) for turn in rollout.turns
    )
    return replace(rollout, turns=tuple(turns))


Incoming = TypeVar("Incoming")
_THREAD_SEND_S = 1.0


class Connection(asyncio.Protocol, Generic[Incoming]):
    """Decodes incoming frames for `on_frame`; calls `on_lost` with the reason when it ends.

    `on_frame` must not block. A frame that cannot be decoded ends the connection. Frames that are
    sent in one iteration of the event loop are written together. A thread may send as well while
    the loop is blocked, which is how a worker reports that it is stuck.
    """

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Incoming]",
        *,
        on_frame: Callable[[Incoming], None],
        on_lost: Callable[[str], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._decoder = decoder
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._received = bytearray()
        self._pending: list[bytes] = []
        self._write_lock = threading.Lock()
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._why = ""
        self._is_lost = False

    @property
    def is_open(self) -> bool:
        """Whether frames can still be sent."""
        transport = self._transport
        return transport is not None and not transport.is_closing()

    def send(self, frame: HostFrame | WorkerFrame) -> None:
        """Send a frame from the event loop; does nothing once the connection has ended."""
        data = to_bytes(frame)
        if not self.is_open:
            return
        if not self._pending:
            assert self._loop is not None, "an open connection has a loop"
            self._loop.call_soon(self.flush)
        self._pending.append(data)

    def flush(self) -> None:
        """Write the pending frames now."""
        pending, self._pending = self._pending, []
        if pending and self._transport is not None and self.is_open:
            with self._write_lock:
                self._transport.write(b"".join(pending))

    def send_from_thread(self, frame: HostFrame | WorkerFrame) -> None:
        """Send a small frame from a thread, even while the event loop is blocked.

        The frame is dropped when earlier bytes are still unsent, because a frame in the middle of
        another would break both.
        """
        data = to_bytes(frame)
        with self._write_lock:
            transport = self._transport
            if transport is None or transport.is_closing() or transport.get_write_buffer_size():
                return
            handle: socket.socket = transport.get_extra_info("socket")
            try:
                _write_all(handle.fileno(), data)
            except OSError:
                return

    def close(self, why: str = "") -> None:
        """Send the pending frames, then end the connection."""
        self._why = self._why or why
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self, why: str) -> None:
        """End the connection now; pending frames are lost."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of the new connection."""
        assert isinstance(transport, asyncio.Transport), "the protocol needs a stream"
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        # No flow control: everything in flight is kept in memory anyway.
        transport.set_write_buffer_limits(high=2**62)

    def data_received(self, data: bytes) -> None:
        """Pass on every complete frame."""
        self._received += data
        try:
            self._read_frames()
        except ProtocolError as error:
            self.abort(str(error))

    def _read_frames(self) -> None:
        start, end = 0, len(self._received)
        try:
            while end - start >= LENGTH_BYTES and not self._why:
                header = start + LENGTH_BYTES
                length = length_of(self._received[start:header])
                if length > self.max_frame_bytes:
                    raise ProtocolError(
                        f"a message of {length} bytes was announced, above the limit of "
                        f"{self.max_frame_bytes} bytes; the other side does not use this protocol, "
                        "or sends too much at once"
                    )
                if end - header < length:
                    break
                start = header + length
                self._on_frame(self._decode(bytes(self._received[header:start])))
        finally:
            del self._received[:start]

    def _decode(self, body: bytes) -> Incoming:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"a malformed message of {len(body)} bytes arrived ({foreign(str(error), 300)})"
            ) from error

    def connection_lost(self, exc: Exception | None) -> None:
        """Report why the connection ended, once."""
        if not self._is_lost:
            self._is_lost = True
            reason = f"{type(exc).__name__}: {exc}" if exc is not None else "the connection closed"
            self._on_lost(self._why or reason)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data` to a nonblocking socket, or nothing when it stays full for too long."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            ready = is_ready(descriptor, wait_s=_THREAD_SEND_S, to_write=True)
            if not ready and len(view) == len(data):
                return
