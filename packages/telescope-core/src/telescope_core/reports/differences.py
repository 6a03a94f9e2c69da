"""Sentences about the comparison of two evals, for terminals and pages."""

import math
from collections.abc import Iterator, Sequence

from telescope_core.base.number_text import counted, style_of
from telescope_core.evals.comparison import ComparedEval, Comparison, Difference

_MOST_CHANGES = 3
"""Most changes of code that are named; a new release may change every file."""


def paragraph(comparison: Comparison) -> str:
    """Return the sentence about the main measure, and what limits the comparison."""
    return " ".join([f"{sentence(comparison.main)}.", *cautions(comparison)])


def sentence(difference: Difference, *, unit: str = "example") -> str:
    """Return a sentence about the difference in one measure, with its interval.

    `unit`: what is paired.
    """
    one = difference
    style = style_of_difference(one)
    moved = f"from {one.before:{style}} to {one.after:{style}}"
    if not one.is_comparable:
        over = over_of(one, unit)
        return (
            f"{one.measure}: {moved} ({one.change:+{style}}, {over}), which shows nothing, because "
            "the two results are not comparable"
        )
    if one.low is None or one.high is None or one.p is None:
        on = over_of(one, unit) if one.num_clusters else f"a single {unit}"
        return f"{one.measure}: {moved} on {on}, which shows nothing about others"
    numbers = (
        f"{one.change:+{style}}, {interval(one.low, one.high, style)}, p {format_p(one.p)}, "
        f"paired over {over_of(one, unit)}"
    )
    if one.is_shown:
        return f"{one.measure} {'rose' if one.change > 0 else 'fell'} {moved} ({numbers})"
    if one.is_alike:
        could = f"all {unit}s changed by the same, so what they could show is not known"
    elif one.detectable is None:
        few = "clusters" if one.num_clusters else f"{unit}s"
        could = f"too few {few} to find even the largest difference 4 times in 5"
    else:
        could = f"a true difference of {one.detectable:{style}} would be found 4 times in 5"
    return f"{one.measure}: no difference shown, {moved} ({numbers}; {could})"


def over_of(one: Difference, unit: str = "example") -> str:
    """Return the number of examples that are compared, and of their clusters."""
    tasks = counted(one.num_tasks, unit)
    return f"{tasks} in {counted(one.num_clusters, 'cluster')}" if one.num_clusters else tasks


def style_of_difference(one: Difference) -> str:
    """Return how to write the numbers of a difference; those of pass@k have three decimals."""
    return ".3f" if one.measure.startswith("pass") else style_of(one.before, one.after, one.change)


def interval(low: float, high: float, style: str) -> str:
    """Return a 95% interval with its name, or that its numbers are too large for one."""
    if not math.isfinite(low) or not math.isfinite(high):
        return "no interval, because its ends are not finite numbers"
    return f"95% interval {low:+{style}} to {high:+{style}}"


def format_p(p: float) -> str:
    """Return a p value with its sign of relation, such as `= 0.012` or `< 0.001`."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def cautions(comparison: Comparison) -> list[str]:
    """Return sentences about reasons why the two evals are hard to compare."""
    found: list[str] = []
    if comparison.code_changes:
        shown = ", ".join(comparison.code_changes[:_MOST_CHANGES])
        rest = len(comparison.code_changes) - _MOST_CHANGES
        more = f" and {rest} more" if rest > 0 else ""
        why = (
            "The rollouts of both are the same, so that what differs is how the environment's code "
            "grades them"
            if comparison.is_graded_again
            else "The two results are not comparable, because the environment's code changed in "
            "between"
        )
        found.append(f"{why}: {shown}{more}.")
    if comparison.setting_changes:
        found.append(
            "The two evals were played with different settings: "
            f"{', '.join(comparison.setting_changes)}."
        )
    for number, which in (
        (comparison.num_only_before, "first"),
        (comparison.num_only_after, "second"),
    ):
        if number:
            noun = "example is" if number == 1 else "examples are"
            found.append(f"{number} {noun} left out, because only the {which} eval scored them.")
    found += _unscored(comparison.before, "first")
    found += _unscored(comparison.after, "second")
    found += _of_fewer(comparison.differences)
    return found


def _unscored(one: ComparedEval, which: str) -> Iterator[str]:
    """Yield a sentence about rollouts of an eval that have no reward."""
    counts = {"failed": one.num_failed, "are missing": one.num_missing}
    told = " and ".join(f"{number} {what}" for what, number in counts.items() if number > 0)
    if told:
        yield (
            f"Of {one.num_rollouts} rollouts of the {which} eval, {told}; what has no reward is "
            "left out, which can change the means."
        )


def _of_fewer(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield a sentence about the measures that leave out examples with too few scored rollouts."""
    num_tasks = max(one.num_tasks for one in differences)
    fewer = [one for one in differences if one.num_tasks < num_tasks]
    if fewer:
        told = ", ".join(
            f"{one.measure} is over {one.num_tasks} of {num_tasks} examples" for one in fewer
        )
        yield f"{told}, because the others have fewer scored rollouts than k."
