"""`Finding`: one thing that is wrong with a run, where it shows, and what to try."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """Severity of a finding."""

    BROKEN = "broken"
    """The run cannot learn in this state."""
    UNHEALTHY = "unhealthy"
    """A trend that good runs do not show; a person has to judge it."""
    SLOW = "slow"
    """The run learns, but time is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a rule."""

    rule: str
    """Name of the rule, which reports a problem once for a run, or once for each environment."""
    kind: Kind
    first_step: int
    """First step at which it shows."""
    last_step: int
    is_over: bool
    """Whether later steps no longer show it."""
    cause: str
    """The observation with its numbers, and its meaning: one or two sentences."""
    remedy: str
    """Suggestion, which names the settings to change."""
    metrics: tuple[str, ...]
    """The metrics that show it, the most telling one first."""
    environment: str | None = None
    """Name of the environment; None = all of them together."""
    rollouts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Filters of `telescope ui` for the rollouts that show it; empty if none do."""

    @property
    def text(self) -> str:
        """The finding as one paragraph."""
        where = f" in {self.environment}" if self.environment else ""
        steps = f"step {self.first_step}"
        if self.last_step > self.first_step:
            steps = f"steps {self.first_step} to {self.last_step}"
        if not self.is_over:
            steps = f"since step {self.first_step}"
        return f"{self.rule}{where}, {steps}: {self.cause} {self.remedy}"

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for programs."""
        return {**asdict(self), "rollouts": dict(self.rollouts), "text": self.text}
