"""Per-token metrics that reduce exactly over micro-batches and ranks.

A metric travels as total, count, lowest and highest. Means are taken once, at the end, because a
mean of means would depend on how tokens were packed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSum:
    """A metric over some tokens."""

    total: float
    """Sum over the tokens, in the unit of the metric."""
    count: float
    """Number of tokens."""
    lowest: float
    """+inf when the count is 0."""
    highest: float
    """-inf when the count is 0."""

    def merge(self, other: "MetricSum") -> "MetricSum":
        """Return the metric over the tokens of both."""
        return MetricSum(
            total=self.total + other.total,
            count=self.count + other.count,
            lowest=min(self.lowest, other.lowest),
            highest=max(self.highest, other.highest),
        )

    @property
    def mean(self) -> float:
        """The mean over all tokens; defined for a count above 0 only."""
        return self.total / self.count


MetricSums: TypeAlias = Mapping[str, MetricSum]

SPREAD = ("mismatch", "importance_weight", "behave_imp_weight")
"""Metrics shown as `name/mean`, `name/min` and `name/max`; the others show their mean as `name`."""
EFFECTIVE_SIZE = "effective_sample_size"
"""Shown as (sum w)^2 / (count * sum w^2), from 0 to 1. The sum of w travels as `.../weight`, that
of its square as `.../square`."""


def reduce_metrics(parts: Iterable[MetricSums]) -> dict[str, MetricSum]:
    """Merge the metrics of micro-batches or ranks; the result is the same in any grouping."""
    merged: dict[str, MetricSum] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = merged[name].merge(value) if name in merged else value
    return merged


def metric_row(sums: MetricSums) -> dict[str, float]:
    """Return the numbers to record. A metric over no token is left out: absent, not 0."""
    row: dict[str, float] = {}
    for name, value in sums.items():
        if value.count == 0 or name == f"{EFFECTIVE_SIZE}/weight":
            continue
        if name == f"{EFFECTIVE_SIZE}/square":
            weight = sums[f"{EFFECTIVE_SIZE}/weight"].total
            row[EFFECTIVE_SIZE] = weight**2 / (value.count * value.total) if value.total else 0.0
            continue
        if name in SPREAD:
            row[f"{name}/mean"] = value.mean
            row[f"{name}/min"] = value.lowest
            row[f"{name}/max"] = value.highest
        else:
            row[name] = value.mean
    return row
