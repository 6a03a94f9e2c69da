"""Spans, model calls and gauges: the rows of `timeline/`, `calls/` and `gauges/` in a run.

`rollouts/` has the conversations, and `events/` the stages of each attempt; `blocks` reads and
writes these.
"""

from dataclasses import dataclass

from telescope_core.base.types import WeightVersion

TIMELINE_FOLDER = "timeline"
CALLS_FOLDER = "calls"
GAUGES_FOLDER = "gauges"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """A span of time in which something was done."""

    time_s: float
    """Start: seconds since 1970, UTC, on the clock of the run's driver."""
    duration_s: float
    """0 for an event without duration."""
    name: str
    """Name of the activity, such as `forward`; spans of one source nest by their times."""
    source: str
    """Its process: `driver`, `rank 3`, `environment math`, or the address of a server."""
    step: int | None = None
    """The step that it belongs to."""
    microbatch: int | None = None
    """Index of the microbatch in its step, 0 first."""
    version: WeightVersion | None = None
    """Version of the weights that it saved."""
    note: str = ""
    """Remark for people, such as the reason for a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request to a model, from its start to its answer."""

    time_s: float
    """Time of sending: seconds since 1970, UTC, on the clock of the run's driver."""
    duration_s: float
    """Until the answer arrived, on the driver's clock."""
    server: str
    """Address of the server that finished it."""
    environment: str = ""
    """Environment of the attempt; for an eval, the folder of its records in `evals/`."""
    group_id: str = ""
    index: int = 0
    """Position of the rollout in its group."""
    attempt: int = 1
    """1 = the first attempt at the rollout."""
    call: int = 1
    """Number of the model call in its attempt, 1 first."""
    step: int | None = None
    """The step for whose batch the rollout was drawn; None for an eval."""
    version: WeightVersion | None = None
    """Version of the weights that sampled its first token."""
    queue_s: float | None = None
    """Seconds in the server's queue; this and the next three are measured by the server."""
    first_token_s: float | None = None
    """From its arrival at the server to its first token."""
    prefill_s: float | None = None
    """From its start on the engine to its first token."""
    decode_s: float | None = None
    """From its first token to its last."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the server found in its cache."""
    num_completion_tokens: int = 0
    error: str = ""
    """Reason why there was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSample:
    """One reading of a meter."""

    time_s: float
    """Seconds since 1970, UTC, on the clock of the run's driver."""
    source: str
    """Source of the reading: `node NAME`, `node NAME gpu 3`, or the address of a server."""
    name: str
    """Name of the meter, with its unit: `gpu/memory_used_bytes`, `vllm/queue_s`."""
    value: float
