"""The frames of the environment protocol: the messages between host and worker.

A frame is a four-byte big-endian length and a msgpack array that begins with the kind of frame.
Types of core are sent as maps by field name, so that a field that one side does not know is
ignored. `docs/reference/environment-protocol.md` describes the exchange.
"""

import struct
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import msgspec

from telescope_core.base.errors import TelescopeError
from telescope_core.base.protocols import PlayRequest
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

MAX_FRAME_BYTES = 64 * 2**20
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
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(frame).__name__.lower()} message of {len(body)} bytes exceeds the "
            f"{MAX_FRAME_BYTES} bytes of the environment protocol; keep large data out of "
            "conversations, Example.info and rollouts"
        )
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes | bytearray | memoryview) -> int:
    """Return the length in bytes of the body that follows `header`."""
    return _LENGTH.unpack(header)[0]


def as_raw(value: object) -> msgspec.Raw:
    """Encode the value of a Reply."""
    return msgspec.Raw(_ENCODER.encode(value))


def without_tokens(rollout: Rollout) -> Rollout:
    """Return `rollout` without token ids and log-probs, which a worker must not see or invent."""
    turns = (
        replace(turn, completion=replace(turn.completion, tokens=None)) for turn in rollout.turns
    )
    return replace(rollout, turns=tuple(turns))
