"""The held-out evals of a run in the order of the weights, and the first against the last one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from telescope_core.base.errors import ConfigError
from telescope_core.evals.comparison import Comparison, compare_results
from telescope_core.evals.result import EvalResult
from telescope_core.evals.stats import Estimate

BEFORE, AFTER = "before", "after"
"""Tags of the evals with the first and the last weights of a run."""
_EVAL_FOLDER = re.compile(r"(?s)(?P<name>.+)-(?P<tag>before|after|step-\d+)")


def label_of(tag: str) -> str:
    """Return the moment of an eval in words."""
    return tag.replace("step-", "step ")


def order_of(tag: str) -> tuple[int, int]:
    """Return a key that sorts evals by the age of their weights, the oldest first."""
    if tag in (BEFORE, AFTER):
        return (0 if tag == BEFORE else 2, 0)
    return (1, int(tag.removeprefix("step-")))


class Moment(NamedTuple):
    """One eval among those of its name."""

    tag: str
    """`before`, `after`, or `step-N`."""
    result: EvalResult

    @property
    def label(self) -> str:
        """The moment in words."""
        return label_of(self.tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """One held-out eval of a run, from its first moment to its last."""

    name: str
    moments: tuple[Moment, ...]
    """At least one, in the order of the weights."""
    comparison: Comparison | None
    """The paired comparison of the first and the last moment; None when there is only one, or no
    example is in both."""

    @property
    def measure(self) -> str:
        """Name of the measure, such as `pass@1`."""
        return f"pass@{self._k}"

    @property
    def estimates(self) -> list[tuple[Moment, Estimate]]:
        """The measure of every moment that has it."""
        found = ((one, one.result.pass_at.get(self._k)) for one in self.moments)
        return [(moment, estimate) for moment, estimate in found if estimate is not None]

    @property
    def title(self) -> str:
        """The name, and the compared moments unless these are before and after training."""
        first, last = self.moments[0], self.moments[-1]
        if (first.tag, last.tag) == (BEFORE, AFTER):
            return self.name
        return f"{self.name}, {first.label} to {last.label}"

    @property
    def _k(self) -> int:
        known = self.moments[-1].result.pass_at
        return 1 if 1 in known else min(known)


def before_and_after(evals: Mapping[str, EvalResult]) -> list[BeforeAfter]:
    """Return the evals in the folders `<name>-before`, `<name>-step-<N>` and `<name>-after`."""
    return [from_first_to_last(by_tag) for _, by_tag in sorted(by_moment(evals).items())]


def by_moment(evals: Mapping[str, EvalResult]) -> dict[str, dict[str, EvalResult]]:
    """Return name -> tag -> result of the evals in folders `<name>-<tag>`."""
    tagged: dict[str, dict[str, EvalResult]] = {}
    for folder, result in evals.items():
        match = _EVAL_FOLDER.fullmatch(folder)
        if match:
            tagged.setdefault(match["name"], {})[match["tag"]] = result
    return tagged


def from_first_to_last(by_tag: Mapping[str, EvalResult]) -> BeforeAfter:
    """Return the evals of one name, of which there is at least one, by their tags."""
    moments = tuple(Moment(tag, by_tag[tag]) for tag in sorted(by_tag, key=order_of))
    first, last = moments[0], moments[-1]
    return BeforeAfter(
        name=last.result.environment,
        moments=moments,
        comparison=None if first is last else _compared(first.result, last.result),
    )


def _compared(before: EvalResult, after: EvalResult) -> Comparison | None:
    try:
        return compare_results(before, after)
    except ConfigError:
        return None
