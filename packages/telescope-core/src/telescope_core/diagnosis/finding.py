"""`Finding`: one thing that is wrong with a run, with where it shows and what to try."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How sure a finding is, and what it costs."""

    BROKEN = "broken"
    """Nothing can be learned like this."""
    UNHEALTHY = "unhealthy"
    """A trend that good runs do not show; a person has to judge it."""
    SLOW = "slow"
    """It learns, and time is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule found."""

    rule: str
    """Name of the rule; one rule finds a thing once for a run, or once for an environment."""
    kind: Kind
    first_step: int
    """Step from which on it shows."""
    last_step: int
    is_over: bool
    """Later steps do not show it any more."""
    cause: str
    """What is seen, with its numbers, and what that means: one or two sentences."""
    remedy: str
    """What to try, with the settings by name."""
    metrics: tuple[str, ...]
    """The metrics that show it, the most telling one first."""
    environment: str | None = None
    """None = all of them together."""
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
