"""What the sampler hands on: the batch of a step, and its own state in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from telescope_core.types import (
    Group,
)
from telescope_train.rollouts.failures import Boundary


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """The groups of one step."""

    groups: tuple[Group, ...]
    rejected: tuple[Group, ...] = ()
    """Those that `should_accept_fn` turned down, their rollouts marked with the reason."""
    failed_attempts: Mapping[Boundary, int] = field(default_factory=dict[Boundary, int])
    """Attempts that failed, those included that another attempt made good."""
    queues: Mapping[str, int] = field(default_factory=dict[str, int])
    """What was finished, played and waiting when the trainer asked for the batch."""
    workers: Mapping[str, float] = field(default_factory=dict[str, float])
    """How the processes of each environment were then, as `name/what`."""
    duration_s: float
    """From admission to the last reward."""

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """Accepted ones, then rejected ones."""
        return (*self.groups, *self.rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Where sampling stands, in a form that outlives the process."""

    next_batch: int
    """First batch that is admitted from here on."""
    draw_position: int
    """Examples drawn before its first one."""
    batches: Mapping[int, SampledBatch]
    """Sampled by older weights and not yet trained on, by number."""
