"""Pair the held-out evals at the start and at the end of a run, with those in between."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from telescope_core.errors import ConfigError
from telescope_core.evals.comparison import Comparison, compare_results
from telescope_core.evals.result import EvalResult
from telescope_core.evals.stats import Estimate

_EVAL_FOLDER = re.compile(r"(?P<name>.+)-(?P<tag>before|after|step-\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """One held-out eval at the start and at the end of a run."""

    name: str
    measure: str
    """Name of the measure, such as `pass@1`."""
    before: Estimate | None
    after: Estimate | None
    between: tuple[tuple[int, Estimate], ...] = ()
    """(step, estimate) of the evals in between, by step."""
    comparison: Comparison | None = None
    """The paired comparison; None when one of the two is missing, or no example is in both."""


def before_and_after(evals: Mapping[str, EvalResult]) -> list[BeforeAfter]:
    """Pair the eval folders `<name>-before` and `<name>-after`."""
    tagged: dict[str, dict[str, EvalResult]] = {}
    for folder, result in evals.items():
        match = _EVAL_FOLDER.fullmatch(folder)
        if match:
            tagged.setdefault(match["name"], {})[match["tag"]] = result
    pairs: list[BeforeAfter] = []
    for _, by_tag in sorted(tagged.items()):
        before, after = by_tag.get("before"), by_tag.get("after")
        any_result = after or before
        if any_result is None:
            continue
        k = 1 if 1 in any_result.pass_at else min(any_result.pass_at)
        pairs.append(
            BeforeAfter(
                name=any_result.environment,
                measure=f"pass@{k}",
                before=before.pass_at.get(k) if before else None,
                after=after.pass_at.get(k) if after else None,
                between=_between(by_tag, k),
                comparison=compared(before, after),
            )
        )
    return pairs


def _between(by_tag: Mapping[str, EvalResult], k: int) -> tuple[tuple[int, Estimate], ...]:
    found = {
        int(tag.removeprefix("step-")): estimate
        for tag, result in by_tag.items()
        if tag.startswith("step-") and (estimate := result.pass_at.get(k)) is not None
    }
    return tuple(sorted(found.items()))


def compared(before: EvalResult | None, after: EvalResult | None) -> Comparison | None:
    """Return the paired comparison; None without two evals that scored an example in common."""
    if before is None or after is None:
        return None
    try:
        return compare_results(before, after)
    except ConfigError:
        return None
