"""`Finding`: one thing that is wrong with a run. `Rule`: finds it, perhaps in consecutive steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from telescope_core.diagnosis.history import Change, History, Stretch


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


Found = Iterator[Finding]
Series = Sequence[tuple[int, float]]
"""Pairs of step and value."""


class Rule(NamedTuple):
    """One rule; its findings have its name and kind."""

    name: str
    kind: Kind
    question: str
    """The question about a run that it answers."""
    find: Callable[["Rule", History], Found] = lambda rule, history: iter(())

    def over(
        self,
        stretch: Stretch,
        cause: str,
        remedy: str,
        *metrics: str,
        environment: str | None = None,
        rollouts: Mapping[str, str] | None = None,
    ) -> Finding:
        """Return the finding about the steps in `stretch`."""
        return Finding(
            rule=self.name,
            kind=self.kind,
            first_step=stretch.first,
            last_step=stretch.last,
            is_over=stretch.is_over,
            cause=cause,
            remedy=remedy,
            metrics=metrics,
            environment=environment,
            rollouts=rollouts or {},
        )

    def since(
        self,
        change: Change,
        history: History,
        cause: str,
        remedy: str,
        *metrics: str,
        environment: str | None = None,
    ) -> Finding:
        """Return the finding about the newest window."""
        stretch = Stretch(change.first_step, history.last_step, False)
        return self.over(stretch, cause, remedy, *metrics, environment=environment)

    def in_a_row(
        self,
        cause: str,
        remedy: str,
        *metrics: str,
        holds: Callable[[float], bool],
        least: int = 3,
        of: str = "",
        series: Callable[[History], Series] | None = None,
        rollouts: Mapping[str, str] | None = None,
    ) -> "Rule":
        """Return this rule: it reports at least `least` consecutive steps with `holds` true.

        The values are those of the first of `metrics`, of its share of the metric `of`, or of
        `series`. `cause` may name `{last}`, the last of them that holds, and `{recent}`, the mean
        of the metric now.
        """

        def find(rule: Rule, history: History) -> Found:
            if series is not None:
                values = series(history)
            else:
                values = history.share(metrics[0], of) if of else history.named(metrics[0])
            stretch = history.stretch(values, holds, least=least)
            if stretch is not None:
                last, recent = dict(values)[stretch.last], history.recent(metrics[0])
                said = cause.format(last=last, recent=recent)
                yield rule.over(stretch, said, remedy, *metrics, rollouts=rollouts)

        return self._replace(find=find)
