"""`Rule`: one rule of `diagnose`, which may look for consecutive steps in which something holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from telescope_core.diagnosis.finding import Finding, Kind
from telescope_core.diagnosis.history import Change, History, Stretch

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
