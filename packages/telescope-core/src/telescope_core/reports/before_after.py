"""The evals of a run in the order of the weights, and the first against the last one."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.errors import ConfigError
from telescope_core.evals.comparison import Comparison, compare_results
from telescope_core.evals.result import EvalResult
from telescope_core.evals.stats import Estimate

BEFORE, AFTER = "before", "after"
"""Tags of the evals with the first and the last weights of a run."""
_EVAL_FOLDER = re.compile(r"(?s)(?P<name>.+)-(?P<tag>before|after|step-\d+)")


def eval_folder_name(environment: str, tag: str) -> str:
    """Return the name of the folder of an eval; a path in the name of an environment is kept."""
    name = environment.replace("/", "-").replace(":", "-").lstrip(".-")
    return f"{name}-{tag}"


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
    """One eval of a run, from its first moment to its last."""

    name: str
    moments: tuple[Moment, ...]
    """At least one, in the order of the weights."""
    comparison: Comparison | None
    """The paired comparison of the first and the last moment; None when there is only one, or no
    example is in both."""
    is_held_out: bool = True
    """Whether the run trains on another split, or on other examples of this one."""

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


def before_and_after(
    evals: Mapping[str, EvalResult], trained: Collection[str] = ()
) -> list[BeforeAfter]:
    """Return the evals in the folders `<name>-before`, `<name>-step-<N>` and `<name>-after`.

    `trained`: see `trained_evals`.
    """
    # Not the name in a result: workers that run elsewhere have another one.
    folders = {eval_folder_name(name, "") for name in trained}
    return [
        replace(from_first_to_last(by_tag), is_held_out=f"{name}-" not in folders)
        for name, by_tag in sorted(by_moment(evals).items())
    ]


def trained_evals(
    config: Mapping[str, Any], records: Mapping[str, EnvironmentRecord]
) -> tuple[str, ...]:
    """Return the names of the evals of a run that play the split that it trains on.

    `config`: its settings as they are recorded; `records`: its environments, by their names there.
    """

    def played(entry: Mapping[str, Any], split: str) -> tuple[str, str]:
        record = records.get(entry["name"])
        known = entry["name"] if record is None else record.id.partition("@")[0]
        return known, entry.get("split") or split

    # Settings of supervised training have neither.
    section: Mapping[str, Any] = config.get("evals") or {}
    entries: Sequence[Mapping[str, Any]] = section.get("evals") or ()
    trained = {played(one, "train") for one in config.get("environments") or ()}
    return tuple(
        one["name"]
        for one in entries
        if not one.get("separate_eval_samples") and played(one, "eval") in trained
    )


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
