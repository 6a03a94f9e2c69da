"""What lasted, and what was measured: the rows of `timeline/`, `calls/` and `gauges/` in a run.

`rollouts/` has what was said, `events/` what each attempt did; `blocks` reads and writes these.
"""

from dataclasses import dataclass

from telescope_core.base.types import WeightVersion

TIMELINE_FOLDER = "timeline"
CALLS_FOLDER = "calls"
GAUGES_FOLDER = "gauges"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSpan:
    """Something that took a while."""

    time_s: float
    """When it began: seconds since 1970, UTC, on the clock of the run's driver."""
    duration_s: float
    """0 for what happened at one moment."""
    name: str
    """What it was, such as `forward`; spans of one source lie within each other by their times."""
    source: str
    """Who did it: `driver`, `rank 3`, `environment math`, or the address of a server."""
    step: int | None = None
    """The step that it was done for."""
    microbatch: int | None = None
    """Which of the step's microbatches, 0 first."""
    version: WeightVersion | None = None
    """Weights that it saved."""
    note: str = ""
    """What a person should know, such as the reason of a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One request to a model, from its being sent to its answer."""

    time_s: float
    """When it was sent: seconds since 1970, UTC, on the clock of the run's driver."""
    duration_s: float
    """Until the answer was there, on the driver's clock."""
    server: str
    """Address of the server that finished it."""
    environment: str = ""
    """Of the attempt that asked; for an eval, the folder of its records in `evals/`."""
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
    """Weights of its first token."""
    queue_s: float | None = None
    """Time in the server's queue; this and the next three are as the server measured them."""
    first_token_s: float | None = None
    """From its arrival at the server to its first token."""
    prefill_s: float | None = None
    """From its start on the engine to its first token."""
    decode_s: float | None = None
    """From its first token to its last."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt that the server had computed before."""
    num_completion_tokens: int = 0
    error: str = ""
    """Why there was no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSample:
    """What one meter showed at one moment."""

    time_s: float
    """Seconds since 1970, UTC, on the clock of the run's driver."""
    source: str
    """What was measured: `node NAME`, `node NAME gpu 3`, or the address of a server."""
    name: str
    """Which meter, with its unit: `gpu/memory_used_bytes`, `vllm/queue_s`."""
    value: float
