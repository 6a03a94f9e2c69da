"""Pair the held-out evals at the start and at the end of a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from telescope_core.environment_record import changes
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
    changed: tuple[str, ...] = ()
    """Differences in the environment's code; if there are any, the evals are not comparable."""

    @property
    def is_apart(self) -> bool:
        """Whether the two intervals have no value in common, whichever of them is higher."""
        before, after = self.before, self.after
        if before is None or after is None or before.low is None or after.low is None:
            return False
        assert before.high is not None, "an interval has both ends or none"
        assert after.high is not None, "an interval has both ends or none"
        return before.high < after.low or after.high < before.low


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
                changed=_code_changes(before, after),
            )
        )
    return pairs


def _code_changes(before: EvalResult | None, after: EvalResult | None) -> tuple[str, ...]:
    old = before.environment_record if before is not None else None
    new = after.environment_record if after is not None else None
    return tuple(changes(old, new)) if old is not None and new is not None else ()
