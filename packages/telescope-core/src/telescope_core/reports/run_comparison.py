"""Compare two runs: the settings in which they differ, and their results, in pairs.

Evals after the same number of training steps are paired by example, rewards of training by step,
over the examples that both runs played at that step. `evals.comparison` computes the numbers.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from telescope_core.base.environment_record import all_changes
from telescope_core.base.errors import ConfigError
from telescope_core.evals.comparison import (
    Comparison,
    Difference,
    compare_results,
    paired_difference,
)
from telescope_core.evals.folder import read_results
from telescope_core.evals.result import EvalResult
from telescope_core.evals.stats import most_common
from telescope_core.records.files import read_json
from telescope_core.records.identity import Resume
from telescope_core.records.run_folder import SETTINGS_FILE, RunFolder
from telescope_core.reports.before_after import AFTER, BEFORE, by_moment, order_of
from telescope_core.reports.differences import cautions, sentence
from telescope_core.settings.differing import Differing, differing, nobody_set

_MOST_NAMED = 3
"""Most measures that the verdict names."""


class Outcome(StrEnum):
    """Result of the second run, compared with the first one."""

    BETTER = "better"
    """A deciding measure is higher, and none is lower."""
    WORSE = "worse"
    """A deciding measure is lower, and none is higher."""
    MIXED = "mixed"
    """One is higher, and another one is lower."""
    NOT_SHOWN = "not shown"
    """No interval excludes zero."""
    UNKNOWN = "unknown"
    """The runs have no measure in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPair:
    """One held-out eval of both runs, after the same number of training steps."""

    name: str
    step: int
    """Steps of training; 0 = before it."""
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPair:
    """The reward of training in one environment, in both runs."""

    environment: str
    difference: Difference
    """Mean difference over steps; for each step, over the examples that both runs played."""
    first_step: int
    last_step: int
    num_examples: int
    """Number of examples at these steps that both runs played, counted once per step."""
    num_only_one: int
    """Number of examples that only one run played at a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The differences between two runs, in settings and code and in results."""

    settings: tuple[Differing, ...]
    """Settings that differ, without names, folders and ports. Keys: `before`, `after`."""
    following: frozenset[str]
    """Names of changed settings that nobody set, because they follow from others."""
    code: tuple[str, ...]
    """Differences in environments, files and versions of packages, one line each."""
    fork: Resume | None
    """Checkpoint of the first run from which the second one continues; None if it does not."""
    evals: tuple[EvalPair, ...]
    """By name, and then by step."""
    training: tuple[RewardPair, ...]
    outcome: Outcome
    verdict: str
    notes: tuple[str, ...]
    """Reservations about the comparison, a sentence each."""


def compare_runs(before: RunFolder, after: RunFolder) -> RunComparison:
    """Compare two runs; reads their settings, evals and rewards, and writes nothing."""
    runs = {"before": before, "after": after}
    known = {key: read_json(run.path / SETTINGS_FILE) or {} for key, run in runs.items()}
    settings, _ = differing(
        {key: run.config() for key, run in runs.items()},
        {key: one.get("defaults", {}) for key, one in known.items()},
    )
    settings = [one for one in settings if not one.is_place]
    code = _code_changes(before, after)
    notes: list[str] = []
    evals = _eval_pairs(before, after, notes)
    training = list(_reward_pairs(before, after))
    measured = _deciding(evals, training)
    outcome = _outcome([one.difference for one in measured])
    notes += [*_notes_of_runs(before, after), *_notes(evals, training, measured)]
    if not settings and not code and any(one.difference.is_shown for one in measured):
        notes.append("No setting and no code differs, so that chance alone made the difference.")
    return RunComparison(
        settings=tuple(settings),
        following=_following(settings, known.values()),
        code=tuple(code),
        fork=next(
            (
                one
                for one in after.info().resumes
                if one.run and Path(one.run).resolve() == before.path.resolve()
            ),
            None,
        ),
        evals=tuple(evals),
        training=tuple(training),
        outcome=outcome,
        verdict=_verdict(before, after, outcome, measured),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Measured(NamedTuple):
    what: str
    difference: Difference
    unit: str


def _following(
    settings: Sequence[Differing], known: Collection[Mapping[str, Any]]
) -> frozenset[str]:
    """Return the names of settings that nobody set, also of those that one version lacked.

    `known`: the origins of the settings that each run recorded.
    """
    if not all("set" in one for one in known):
        return frozenset()
    given: set[str] = {name for one in known for name in one["set"]}
    return frozenset(one.name for one in settings if nobody_set(one.name, given))


def _code_changes(before: RunFolder, after: RunFolder) -> list[str]:
    old, new = before.info(), after.info()
    lines = [f"environment {line}" for line in all_changes(old.environments, new.environments)]
    for what, first, second in (
        ("file", old.inputs, new.inputs),
        ("package", old.versions, new.versions),
    ):
        if not first or not second:
            continue  # Earlier versions did not record the files.
        for name in dict.fromkeys([*first, *second]):
            one, other = first.get(name, "none"), second.get(name, "none")
            if one != other:
                lines.append(f"{what} {name}: {one[:12]} -> {other[:12]}")
    return lines


def _eval_pairs(before: RunFolder, after: RunFolder, notes: list[str]) -> list[EvalPair]:
    """Return the evals of both runs; adds to `notes` why others cannot be compared."""
    old, new = (_evals_by_step(run, notes) for run in (before, after))
    found: list[EvalPair] = []
    for name, step in sorted(old.keys() & new.keys()):
        try:
            comparison = compare_results(old[name, step], new[name, step])
        except ConfigError as error:
            notes.append(f"{_eval_label(name, step)}: {error}.")
            continue
        found.append(EvalPair(name=name, step=step, comparison=comparison))
    return found


def _evals_by_step(run: RunFolder, notes: list[str]) -> dict[tuple[str, int], EvalResult]:
    results, problems = read_results(run.eval_folders())
    notes += [f"{problem}." for problem in problems.values()]
    known = by_moment(results)
    last = run.last_step()
    found: dict[tuple[str, int], EvalResult] = {}
    for name, by_tag in known.items():
        for tag in sorted(by_tag, key=order_of):
            step = {BEFORE: 0, AFTER: last}.get(tag)
            found[name, order_of(tag)[1] if step is None else step] = by_tag[tag]
    return found


def _reward_pairs(before: RunFolder, after: RunFolder) -> Iterator[RewardPair]:
    steps = sorted(set(before.rollout_steps()) & set(after.rollout_steps()))
    pairs: dict[str, list[_StepPair]] = {}
    for step in steps:
        for environment, pair in _step_pairs(step, before, after).items():
            pairs.setdefault(environment, []).append(pair)
    ranges = [run.info().reward_ranges for run in (before, after)]
    for environment, of_steps in sorted(pairs.items()):
        both = [pair for pair in of_steps if pair.num_examples]
        if not both:
            continue
        before_N, after_N = [pair.before for pair in both], [pair.after for pair in both]
        ends = [end for known in ranges for end in known.get(environment, ())]
        ends = ends or [*before_N, *after_N]
        yield RewardPair(
            environment=environment,
            difference=paired_difference(
                "reward",
                before_N,
                after_N,
                span=(max(ends) - min(ends)) or 1.0,
                rollouts=most_common(pair.num_examples for pair in both),
            ),
            first_step=both[0].step,
            last_step=both[-1].step,
            num_examples=sum(pair.num_examples for pair in both),
            num_only_one=sum(pair.num_only_one for pair in of_steps),
        )


class _StepPair(NamedTuple):
    step: int
    before: float
    after: float
    num_examples: int
    num_only_one: int


def _step_pairs(step: int, before: RunFolder, after: RunFolder) -> dict[str, _StepPair]:
    """Return environment -> mean rewards of both runs over the examples that both played."""
    old, new = _means(before, step), _means(after, step)
    found: dict[str, _StepPair] = {}
    for environment in old.keys() | new.keys():
        first, second = old.get(environment, {}), new.get(environment, {})
        shared = sorted(first.keys() & second.keys())
        means = [
            math.fsum(run[one] for one in shared) / (len(shared) or 1) for run in (first, second)
        ]
        apart = len(first.keys() ^ second.keys())
        found[environment] = _StepPair(step, means[0], means[1], len(shared), apart)
    return found


def _means(run: RunFolder, step: int) -> dict[str, dict[str, float]]:
    """Return environment -> example -> mean reward of its rollouts."""
    rewards: dict[str, dict[str, list[float]]] = {}
    for environment, example_id, reward in run.rewards(step):
        rewards.setdefault(environment, {}).setdefault(example_id, []).append(reward)
    return {
        environment: {name: math.fsum(values) / len(values) for name, values in by_example.items()}
        for environment, by_example in rewards.items()
    }


def _deciding(evals: Sequence[EvalPair], training: Sequence[RewardPair]) -> list[_Measured]:
    """Return the last eval of each name; where there is none, the rewards of training."""
    last: dict[str, EvalPair] = {
        one.name: one for one in evals if one.step and not one.comparison.code_changes
    }
    if last:
        return [
            _Measured(_eval_label(one.name, one.step), one.comparison.main, "example")
            for one in last.values()
        ]
    return [_Measured(f"training on {one.environment}", one.difference, "step") for one in training]


def _eval_label(name: str, step: int) -> str:
    return f"{name} after step {step}" if step else f"{name} before training"


def _outcome(differences: Sequence[Difference]) -> Outcome:
    """Return the outcome according to all deciding measures."""
    if not differences:
        return Outcome.UNKNOWN
    up = any(one.is_shown and one.change > 0 for one in differences)
    down = any(one.is_shown and one.change < 0 for one in differences)
    if up or down:
        return Outcome.MIXED if up and down else Outcome.BETTER if up else Outcome.WORSE
    return Outcome.NOT_SHOWN


def _verdict(
    before: RunFolder, after: RunFolder, outcome: Outcome, measured: Sequence[_Measured]
) -> str:
    one, other = _names(before, after)
    if outcome is Outcome.UNKNOWN:
        return (
            f"Cannot compare {other} with {one}: there is no eval of weights that took as many "
            "steps, and no step at which both played the same examples."
        )
    by_reward = (
        " No eval decides this, only the reward of training." if measured[0].unit == "step" else ""
    )
    is_same = all(not one.difference.change and one.difference.is_alike for one in measured)
    if is_same and max(one.difference.num_tasks for one in measured) > 1:
        told = ", ".join(f"{one.what} ({one.difference.num_tasks} {one.unit}s)" for one in measured)
        return f"{other} scored the same as {one} wherever both were measured: {told}.{by_reward}"
    head = {
        Outcome.BETTER: f"{other} is better than {one}",
        Outcome.WORSE: f"{other} is worse than {one}",
        Outcome.MIXED: f"{other} is better than {one} in one measure and worse in another",
    }.get(outcome, f"No difference is shown between {one} and {other}")
    ranked = sorted(measured, key=lambda each: not each.difference.is_shown)
    told = [f"{each.what}: {sentence(each.difference, unit=each.unit)}" for each in ranked]
    if len(told) > _MOST_NAMED:
        told[_MOST_NAMED:] = [f"and {len(told) - _MOST_NAMED} more"]
    return f"{head}: {'; '.join(told)}.{by_reward}"


def _notes(
    evals: Sequence[EvalPair], training: Sequence[RewardPair], measured: Sequence[_Measured]
) -> Iterator[str]:
    """Yield reservations about the measures."""
    for one in evals:
        # Changes of code are named once, in `code`.
        for caution in cautions(replace(one.comparison, code_changes=())):
            yield f"{_eval_label(one.name, one.step)}: {caution}"
    num_only_one = sum(one.num_only_one for one in training)
    if num_only_one:
        num_both = sum(one.num_examples for one in training)
        yield (
            f"{num_only_one} examples of training were played by one run alone at their step, and "
            f"are left out; {num_both} were played by both."
        )
    if any(one.difference.is_shown for one in measured):
        yield (
            "Each run ran once, and the intervals are of these two models. Runs with equal "
            "settings can differ as much; a fork without a change shows by how much they do."
        )
        if len(measured) > 1:
            yield (
                f"{len(measured)} measures decide, and one in 20 shows a difference where there is "
                "none."
            )


def _notes_of_runs(before: RunFolder, after: RunFolder) -> Iterator[str]:
    """Yield differences between the runs other than settings, and evals that only one has."""
    steps = [run.last_step() for run in (before, after)]
    names = _names(before, after)
    if steps[0] != steps[1]:
        yield (
            f"{names[0]} took {steps[0]} steps and {names[1]} {steps[1]}; what only one of them "
            "did is left out."
        )
    if all_changes(before.info().environments, after.info().environments):
        yield (
            "The code of environments differs, so that the same reward may mean something else; "
            "evals of such environments do not decide the verdict."
        )
    for name, run in zip(names, (before, after), strict=True):
        for resume in run.info().resumes:
            if resume.changed and not resume.run:
                yield (
                    f"{name} itself went on from step {resume.step} with changes: "
                    f"{'; '.join(resume.changed)}."
                )


def _names(before: RunFolder, after: RunFolder) -> list[str]:
    """Return names for the two runs: those of their folders, or the paths if these are equal."""
    paths = [run.path.resolve() for run in (before, after)]
    names = [path.name for path in paths]
    return names if names[0] != names[1] else [str(path) for path in paths]
