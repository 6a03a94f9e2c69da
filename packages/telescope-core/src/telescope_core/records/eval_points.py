"""The evals of a training run, one point for each: `eval_points.jsonl` in a run folder.

An eval whose turn came and that has no result is a point too, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from telescope_core.base.types import WeightVersion


class EvalPointState(StrEnum):
    """What became of an eval."""

    DONE = "done"
    """Played; every token is of the version that was to be evaluated."""
    MIXED = "mixed"
    """Played, and some tokens are of other versions: its numbers are of no single one."""
    SKIPPED = "skipped"
    """Not begun."""
    FAILED = "failed"
    """Begun, and ended by an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """One eval of one version of the weights, or why there is none."""

    time_s: float
    """When it was known, in seconds since 1970, UTC."""
    name: str
    """Of the eval in the settings."""
    tag: str
    """`before`, `after` or `step-N`, as in the name of its folder."""
    version: WeightVersion
    """Which weights were to be evaluated: the number of steps that they had been trained."""
    state: EvalPointState
    reason: str = ""
    """Why it is not `done`."""
    lag_steps: int = 0
    """Steps that training had gone further when it was known."""
    versions: tuple[WeightVersion, ...] = ()
    """Which weights sampled its tokens."""
    num_scored: int = 0
    """Rollouts with a reward."""
    num_failed: int = 0
    """Rollouts without one."""
    reward: float | None = None
    """Mean reward of scored rollouts."""
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    """k -> pass@k."""
    duration_s: float = 0.0
    """Seconds that it took."""
    folder: str = ""
    """Name of its folder in `evals`, whether or not that is there; empty = not recorded."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "EvalPoint":
        """Return what a line of `eval_points.jsonl` says."""
        values: dict[str, Any] = {
            **row,
            "state": EvalPointState(row["state"]),
            "versions": tuple(row["versions"]),
            "pass_at": {int(k): value for k, value in row["pass_at"].items()},
        }
        return cls(**values)

    @property
    def text(self) -> str:
        """The point in one line, for people."""
        where = f"eval {self.tag}, {self.name}"
        if self.state in (EvalPointState.SKIPPED, EvalPointState.FAILED):
            return f"{where}: {self.state.value}: {self.reason}"
        numbers = [] if self.reward is None else [f"reward {self.reward:.3f}"]
        numbers += [f"pass@{k} {value:.3f}" for k, value in self.pass_at.items()]
        many = "" if self.num_failed == 1 else "s"
        numbers += [f"{self.num_failed} rollout{many} failed"] if self.num_failed else []
        late = f", {self.lag_steps} steps later" if self.lag_steps else ""
        mixed = f"; {self.reason}" if self.reason else ""
        return f"{where}: {', '.join(numbers)}{late}{mixed}"
