"""Traces: one for each attempt at a rollout, shared by the driver and the servers.

The id of a trace is computed from the run and the attempt, so nothing has to look it up. It travels
to servers as a W3C `traceparent`.
"""

import hashlib
import secrets
from dataclasses import dataclass

_SAMPLED = "01"


@dataclass(frozen=True, slots=True)
class Traces:
    """The ids of one run's traces."""

    run: bytes
    """First 4 bytes of all trace ids of the run."""

    @classmethod
    def new(cls) -> "Traces":
        """Return new traces for a run."""
        return cls(secrets.token_bytes(4))

    def trace_id(self, group_id: str, index: int, attempt: int) -> bytes:
        """Return the 16 bytes of an attempt's trace id."""
        return self.run + _digest(f"{group_id}/{index}/{attempt}")[:12]

    def root_id(self, group_id: str, index: int, attempt: int) -> bytes:
        """Return the 8 bytes of the span id of the whole attempt."""
        return _digest(f"attempt {group_id}/{index}/{attempt}")[:8]

    def call_id(self, group_id: str, index: int, attempt: int, call: int) -> bytes:
        """Return the 8 bytes of the span id of one model call."""
        return _digest(f"call {call} of {group_id}/{index}/{attempt}")[:8]

    def traceparent(self, group_id: str, index: int, attempt: int, call: int) -> str:
        """Return the `traceparent` header for a model call."""
        trace = self.trace_id(group_id, index, attempt).hex()
        return f"00-{trace}-{self.call_id(group_id, index, attempt, call).hex()}-{_SAMPLED}"

    def has(self, trace_id: bytes) -> bool:
        """Return whether the trace belongs to an attempt of this run."""
        return trace_id.startswith(self.run)


def traced_group(environment: str, group_id: str, *, step: int | None) -> str:
    """Return the name that the group of a call has in traces, of which each stands for one group.

    Evals, whose `step` is None, name their groups alike; their `environment` is their folder.
    """
    return group_id if step is not None else f"{environment}/{group_id}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
