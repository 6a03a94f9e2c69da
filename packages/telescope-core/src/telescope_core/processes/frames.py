"""The frames of the environment protocol: what host and worker say to each other, as data.

A frame is four bytes of length, big-endian, and a msgpack array that begins with the kind of
frame. Core's own types travel as maps by field name, so that a field one side does not know is
passed over. `docs/reference/environment-protocol.md` describes the conversation.
"""

import struct
from typing import Any, TypeAlias

import msgspec

from telescope_core.errors import TelescopeError
from telescope_core.protocols import PlayRequest
from telescope_core.types import (
    ChatEndpoint,
    Completion,
    Group,
    JsonValue,
    Message,
    Sampling,
    Split,
)

MAX_FRAME_BYTES = 64 * 2**20
MAX_HELLO_BYTES = 64 * 2**10
"""Largest frame accepted before the other side has shown its token."""
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size
UNNUMBERED = -1
"""Until a request is sent."""


class ProtocolError(TelescopeError):
    """The other side broke the protocol, or speaks another one."""

    exit_code = 6


class _Frame(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """One message; the class name is its kind."""


class Hello(_Frame, tag="hello"):
    """Host, first: who calls, and what it expects."""

    protocol_min: int
    protocol_max: int
    core_version: str
    token: str
    """Empty over an inherited socket, which nobody else has."""
    environment: str
    """The name it was opened with; empty = whatever is served."""
    environment_version: str
    """Empty = any."""


class Welcome(_Frame, tag="welcome"):
    """Worker: accepted; which environment it is and which secrets its code may read."""

    protocol: int
    core_version: str
    environment: str
    environment_version: str
    pid: int
    secrets: tuple[str, ...]
    has_group_rewards: bool
    """Whether score_group would change anything."""


class Refused(_Frame, tag="refused"):
    """Worker: not accepted, and why; it closes the connection."""

    kind: str
    """Name of the exception class."""
    reason: str


class Open(_Frame, tag="open"):
    """Host, request: build the environment with these settings."""

    settings: dict[str, Any]
    secrets: dict[str, str]
    """Values of declared secrets, by name; empty for a worker on another machine."""
    id: int = UNNUMBERED


class Describe(_Frame, tag="describe"):
    """Host, request: an EnvironmentDescription."""

    id: int = UNNUMBERED


class FetchExample(_Frame, tag="example"):
    """Host, request: one Example."""

    split: Split
    index: int
    id: int = UNNUMBERED


class Gold(_Frame, tag="gold"):
    """Host, request: the scored Rollout of a gold answer, or nil."""

    split: Split
    index: int
    id: int = UNNUMBERED


class Play(_Frame, tag="play"):
    """Host, request: one Rollout, without turns: the host has recorded those."""

    request: PlayRequest
    endpoint: ChatEndpoint | None
    id: int = UNNUMBERED


class ScoreGroup(_Frame, tag="score_group"):
    """Host, request: the Group with its group rewards."""

    split: Split
    example_index: int
    group: Group
    id: int = UNNUMBERED


class Health(_Frame, tag="health"):
    """Host, request: nil, as soon as the event loop gets to it."""

    id: int = UNNUMBERED


class Cancel(_Frame, tag="cancel"):
    """Host: stop request `id`; it is answered with Stopped unless it has ended by then."""

    id: int


class Close(_Frame, tag="close"):
    """Host, request: release everything; nil, and the worker closes the connection."""

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


class Complete(_Frame, tag="complete"):
    """Worker, request: what the policy of play request `call` answers."""

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
    """Worker: nobody waits for Complete `id` any more."""

    id: int


class Beat(_Frame, tag="beat"):
    """Worker, a few times a second, from a thread: how it is."""

    lag_s: float
    """Longest time since the last beat that the event loop did not turn."""
    blocked_s: float
    """How long it has not turned by now; 0 while it turns."""
    blocked_call: int
    """Play request whose code holds it; -1 = none, or unknown."""
    blocked_where: str
    """`file:line in function` of that code."""
    memory_bytes: int
    """Resident."""
    num_stuck_threads: int
    """Threads that still run code of rollouts that have ended."""


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
"""What a host sends."""
WorkerFrame: TypeAlias = Welcome | Refused | Reply | Failure | Stopped | Complete | Withdraw | Beat
"""What a worker sends."""
Request: TypeAlias = Open | Describe | FetchExample | Gold | Play | ScoreGroup | Health | Close


def _plain(value: Any) -> object:
    """Return numbers and arrays of other libraries as Python's own; raises TypeError otherwise."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r} of type {type(value).__name__} is no plain data")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def to_bytes(frame: HostFrame | WorkerFrame) -> bytes:
    """Return `frame` with its length in front; raises ProtocolError when it is too large."""
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(frame).__name__.lower()} message of {len(body)} bytes exceeds the "
            f"{MAX_FRAME_BYTES} bytes of the environment protocol; keep large data out of "
            "conversations, Example.info and rollouts"
        )
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes | bytearray | memoryview) -> int:
    """Return the length of the body that follows `header`."""
    return _LENGTH.unpack(header)[0]


def as_raw(value: object) -> msgspec.Raw:
    """Encode the value of a Reply."""
    return msgspec.Raw(_ENCODER.encode(value))
