"""The evals of a training run, one point for each: `eval_points.jsonl` in a run folder.

An eval whose turn came and that has no result is a point too, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from telescope_core.base.number_text import counted, format_metric
from telescope_core.base.types import WeightVersion


class EvalPointState(StrEnum):
    """The outcome of an eval."""

    DONE = "done"
    """Played, and every token was sampled with the version to be evaluated."""
    MIXED = "mixed"
    """Played, but some tokens were sampled with other versions, so that its numbers belong to
    none."""
    SKIPPED = "skipped"
    """Not started."""
    FAILED = "failed"
    """Started, and ended by an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """One eval of one version of the weights, or the reason why there is none."""

    time_s: float
    """Time at which the outcome was known, in seconds since 1970, UTC."""
    name: str
    """Name of the eval in the settings."""
    tag: str
    """`before`, `after` or `step-N`, as in the name of its folder."""
    version: WeightVersion
    """The version to be evaluated: the number of steps that its weights were trained for."""
    state: EvalPointState
    reason: str = ""
    """Reason why the state is not `done`."""
    lag_steps: int = 0
    """Number of further steps that training had taken when it was known."""
    versions: tuple[WeightVersion, ...] = ()
    """Versions of the weights that sampled its tokens."""
    num_scored: int = 0
    """Rollouts with a reward."""
    num_failed: int = 0
    """Rollouts without one."""
    reward: float | None = None
    """Mean reward of scored rollouts."""
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    """k -> pass@k."""
    duration_s: float = 0.0
    """Time that it took; 0 = not recorded."""
    folder: str = ""
    """Name of its folder in `evals`, whether or not that is there; empty = not recorded."""

    @property
    def text(self) -> str:
        """The point in one line, for people."""
        where = f"eval {self.tag}, {self.name}"
        if self.state in (EvalPointState.SKIPPED, EvalPointState.FAILED):
            return f"{where}: {self.state.value}: {self.reason}"
        numbers = [] if self.reward is None else [f"reward {format_metric(self.reward)}"]
        numbers += [f"pass@{k} {value:.3f}" for k, value in self.pass_at.items()]
        numbers += [f"{counted(self.num_failed, 'rollout')} failed"] if self.num_failed else []
        late = f", {counted(self.lag_steps, 'step')} later" if self.lag_steps else ""
        mixed = f"; {self.reason}" if self.reason else ""
        return f"{where}: {', '.join(numbers)}{late}{mixed}"
