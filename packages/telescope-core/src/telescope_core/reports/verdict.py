"""The verdict on a run: whether it learned, in the same words on pages and in terminals.

Paired evals decide where there are any; without them the reward of training does, and says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from telescope_core.base.number_text import counted, style_of
from telescope_core.diagnosis import Finding, History, diagnose
from telescope_core.evals.comparison import Difference
from telescope_core.evals.distributions import t_quantile
from telescope_core.evals.folder import read_results
from telescope_core.evals.stats import CONFIDENCE
from telescope_core.records.identity import RunState
from telescope_core.records.run_folder import RunFolder
from telescope_core.reports.before_after import (
    AFTER,
    BEFORE,
    BeforeAfter,
    before_and_after,
    trained_evals,
)
from telescope_core.reports.differences import cautions, interval, over_of, style_of_difference

ACCURACY = "accuracy"
"""In supervised training, the expected share of right answers among samples, on held-out examples;
`accuracy/ENVIRONMENT` likewise."""
REWARDS = ("task_reward/mean", "reward/mean", ACCURACY)
"""Metrics that measure the quality of the policy; the first one that is present counts."""
MATTERS = 0.05
"""Share of a measure's range below which a gain counts as none."""
_MOST_NAMED = 3
"""Most evals that the sentence names."""


class RunOutcome(StrEnum):
    """The outcome of a run."""

    LEARNED = "learned"
    """A measure rose, and none fell."""
    MIXED = "mixed"
    """One eval rose, and another one fell."""
    WORSE = "worse"
    """A measure fell, and none rose."""
    COLLAPSED = "collapsed"
    """The reward was lost and has not recovered."""
    NO_GAIN = "no gain"
    """The interval excludes every gain that matters."""
    NOT_SHOWN = "not shown"
    """The interval includes both zero and gains that matter."""
    NOT_TRAINED = "not trained"
    """No optimizer step was taken."""
    TOO_EARLY = "too early"
    """There are too few steps to compare the first with the last ones."""


_HEADS = {
    RunOutcome.LEARNED: ("Learned", "Learned so far"),
    RunOutcome.MIXED: ("Learned in part", "Learned in part so far"),
    RunOutcome.WORSE: ("Got worse", "Got worse so far"),
    RunOutcome.COLLAPSED: ("Collapsed", "Collapsed"),
    RunOutcome.NO_GAIN: ("Did not learn", "Has not learned so far"),
    RunOutcome.NOT_SHOWN: ("Cannot tell whether it learned", "Cannot tell yet whether it learns"),
    RunOutcome.NOT_TRAINED: ("Nothing was trained", "Nothing was trained so far"),
    RunOutcome.TOO_EARLY: ("Too early to tell", "Too early to tell"),
}
"""Beginnings of the sentence: for a run that has ended, and for one that still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """Whether a run learned."""

    outcome: RunOutcome
    text: str
    """The sentence, and its reservations."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for programs."""
        return asdict(self)


class _Reason(NamedTuple):
    outcome: RunOutcome
    text: str


def run_verdict(run: RunFolder, *, state: RunState | None = None) -> RunVerdict:
    """Return the verdict on `run`; `state` is its final state if the folder does not have it."""
    history = History.of_rows(run.metrics())
    results, unreadable = read_results(run.eval_folders())
    config = run.config()
    total = config.get("run", config).get("number_of_steps")
    return verdict_of(
        history,
        diagnose(history),
        before_and_after(results, trained_evals(config, run.info().environments)),
        state=state or run.info().observed_state,
        num_steps=total if isinstance(total, int) else None,
        unreadable=list(unreadable),
        reward_ranges=run.info().reward_ranges,
    )


def verdict_of(
    history: History,
    findings: Sequence[Finding],
    changes: Sequence[BeforeAfter],
    *,
    state: RunState,
    num_steps: int | None,
    unreadable: Sequence[str] = (),
    reward_ranges: Mapping[str, tuple[float, float]] | None = None,
) -> RunVerdict:
    """Return the verdict on a run with these metrics, findings and evals.

    `num_steps`: planned number of steps; None = not known. `unreadable`: folders of evals whose
    results cannot be read, so that the outcome is that of the others. `reward_ranges`: least and
    largest possible reward of each environment, as far as known.
    """
    collapse = next(
        (one for one in findings if one.rule == "collapse" and one.environment is None), None
    )
    by_evals = _by_evals(changes)
    told = _nothing_done(history)
    if told is None and collapse is not None and not collapse.is_over:
        cause = f"{collapse.cause[0].lower()}{collapse.cause[1:]}"
        after = "" if by_evals is None else f" {by_evals.text[0].upper()}{by_evals.text[1:]}"
        told = _Reason(RunOutcome.COLLAPSED, f"{cause}{after}")
    told = told or by_evals or _by_reward(history, reward_ranges or {})
    head = _HEADS[told.outcome][state is RunState.RUNNING]
    if collapse is not None and told.outcome is RunOutcome.COLLAPSED:
        head = f"{head} since step {collapse.first_step}"
    elif unreadable and told is by_evals:
        head = f"{head}, as far as evals can be read"
    notes = [
        f"{change.name}: {note}"
        for change in changes
        if change.comparison is not None
        for note in cautions(change.comparison)
    ]
    if unreadable:
        it = "it does" if len(unreadable) == 1 else "they do"
        notes.append(
            f"The result of {_listed(sorted(unreadable))} cannot be read, so {it} not count."
        )
    ending = _ending(history, state, num_steps)
    return RunVerdict(
        outcome=told.outcome, text=" ".join([f"{head}: {told.text}", *notes, *ending])
    )


def _nothing_done(history: History) -> _Reason | None:
    if not history.last_step:
        return _Reason(RunOutcome.TOO_EARLY, "no step has ended.")
    played = [step for step, _ in history.named("groups/total")]
    if not played or history.named("loss/total"):
        return None
    steps = "the one step took no" if len(played) == 1 else f"none of {len(played)} steps took an"
    return _Reason(RunOutcome.NOT_TRAINED, f"{steps} optimizer step.")


def _by_evals(changes: Sequence[BeforeAfter]) -> _Reason | None:
    """Return the verdict by evals whose code did not change; None if there are none."""
    known = [
        (change, change.comparison.main)
        for change in changes
        if change.comparison is not None and not change.comparison.code_changes
    ]
    if not known:
        return None
    rose = [pair for pair in known if pair[1].is_shown and pair[1].change > 0]
    fell = [pair for pair in known if pair[1].is_shown and pair[1].change < 0]
    rest = [pair for pair in known if not pair[1].is_shown]
    trained = list(dict.fromkeys(one.name for one, _ in known if not one.is_held_out))
    held_out = "" if trained else "held-out "
    if rose or fell:
        outcome = (
            RunOutcome.MIXED if rose and fell else RunOutcome.LEARNED if rose else RunOutcome.WORSE
        )
        moved = [_moves("rose", rose), _moves("fell", fell)]
        text = f"{held_out}{', but '.join(filter(None, moved))}."
        if rest:
            text += f" No difference is shown {_listed([_named(*pair) for pair in rest])}."
    else:
        is_none = all(one.high is not None and one.high < MATTERS for _, one in rest)
        outcome = RunOutcome.NO_GAIN if is_none else RunOutcome.NOT_SHOWN
        text = f"{held_out}{_moves('went', rest)}."
        text += "" if is_none else _needed([one for _, one in rest])
    if trained:
        text += f" It trains on the split that is played on {_listed(trained)}: not held out."
    return _Reason(outcome, text)


def _moves(verb: str, pairs: Sequence[tuple[BeforeAfter, Difference]]) -> str:
    """Return the movement of a measure, as in: pass@1 rose from 0.2 to 0.3 on math (...)."""
    parts: list[str] = []
    measure = ""
    for change, one in pairs:
        ends = (change.moments[0], change.moments[-1])
        is_whole = (ends[0].tag, ends[1].tag) == (BEFORE, AFTER)
        first, last = ("" if is_whole else f" ({end.label})" for end in ends)
        begin = "" if one.measure == measure else f"{one.measure} {verb} "
        measure = one.measure
        style = style_of_difference(one)
        moved = f"from {one.before:{style}}{first} to {one.after:{style}}{last}"
        parts.append(f"{begin}{moved} {_named(change, one)}")
    return _listed(parts)


def _named(change: BeforeAfter, one: Difference) -> str:
    style = style_of_difference(one)
    parts = [f"{one.change:+{style}}", over_of(one)]
    if one.low is not None and one.high is not None:
        parts.insert(1, interval(one.low, one.high, style))
    return f"on {change.name} ({', '.join(parts)})"


def _listed(parts: Sequence[str]) -> str:
    """Return the first of `parts` as one text, and the number of the others."""
    shown = list(parts[:_MOST_NAMED])
    if len(parts) > _MOST_NAMED:
        shown.append(f"{len(parts) - _MOST_NAMED} more")
    return ", ".join(shown[:-1]) + (" and " if shown[1:] else "") + "".join(shown[-1:])


def _needed(differences: Sequence[Difference]) -> str:
    """Return how many examples would reveal a gain that matters, if they were more than used."""
    sizes = [
        (one.num_tasks, one.num_tasks * (one.detectable / MATTERS) ** 2)
        for one in differences
        if one.detectable is not None
    ]
    played, needed = max(sizes, key=lambda pair: pair[1], default=(0, 0.0))
    if needed <= played:
        return ""
    digits = 10 ** max(0, len(str(int(needed))) - 2)
    return f" {math.ceil(needed / digits) * digits:,} examples would show a gain of {MATTERS:g}."


def _by_reward(history: History, ranges: Mapping[str, tuple[float, float]]) -> _Reason:
    metric = next((name for name in REWARDS if name in history.metrics), REWARDS[0])
    if metric == ACCURACY:
        return _by_accuracy(history)
    change = history.from_start(metric)
    if change is None:
        done = counted(history.last_step, "step")
        return _Reason(RunOutcome.TOO_EARLY, f"{done} done, and no evals to compare.")
    # Neighbors share a step each, so that they say as much as two thirds of their number.
    degrees = max(1, 2 * (len(history.named(metric)) - 1) // 3)
    reach = t_quantile((1 + CONFIDENCE) / 2, degrees) * change.error
    low, high = change.size - reach, change.size + reach
    if low > 0 or high < 0:
        outcome = RunOutcome.LEARNED if low > 0 else RunOutcome.WORSE
        verb = "rose" if low > 0 else "fell"
    else:
        spans = [maximum - minimum for minimum, maximum in ranges.values()]
        if not spans:
            names = ("reward/min", "reward/max")
            seen = [value for name in names for _, value in history.named(name)]
            spans = [max(seen) - min(seen)] if seen else []
        span = max(spans, default=0.0) or 1.0
        outcome = RunOutcome.NO_GAIN if high < MATTERS * span else RunOutcome.NOT_SHOWN
        verb = "went"
    style = style_of(change.before, change.after, change.size)
    return _Reason(
        outcome,
        f"training reward {verb} from {change.before:{style}} over the first {change.num_steps} "
        f"steps to {change.after:{style}} over the last {change.num_steps} "
        f"({change.size:+{style}}, {interval(low, high, style)}). There are no evals to compare, "
        "so this is the reward of training.",
    )


def _by_accuracy(history: History) -> _Reason:
    """Return the verdict by accuracy, which is computed from the same examples each time."""
    measured = history.named(ACCURACY)
    if len(measured) < 2:
        return _Reason(RunOutcome.TOO_EARLY, "accuracy has not been measured twice.")
    (first, before), (last, after) = measured[0], measured[-1]
    gain = after - before
    outcome = (
        RunOutcome.LEARNED
        if gain >= MATTERS
        else RunOutcome.WORSE
        if gain <= -MATTERS
        else RunOutcome.NO_GAIN
    )
    return _Reason(
        outcome,
        f"accuracy on held-out examples went from {before:.3f} at step {first} to {after:.3f} at "
        f"step {last} ({gain:+.3f}).",
    )


def _ending(history: History, state: RunState, num_steps: int | None) -> list[str]:
    """Return the early end of the run as text, or the time that it still needs."""
    step = history.last_step
    of_all = f" of {num_steps}" if num_steps else ""
    if state is RunState.FAILED:
        return [f"The run failed at step {step}{of_all}."]
    if state is RunState.INTERRUPTED:
        return [f"The run was interrupted at step {step}{of_all}."]
    left_s = seconds_left(history, num_steps) if state is RunState.RUNNING else None
    if left_s is None:
        return []
    minutes = max(1, round(left_s / 60))
    if minutes < 120:
        return [f"About {minutes} {'minute is' if minutes == 1 else 'minutes are'} left."]
    return [f"About {round(minutes / 60)} hours are left."]


def seconds_left(history: History, num_steps: int | None) -> float | None:
    """Return the seconds that the remaining steps will take, at the pace of the newest ones.

    None if that is not known, and at the last step.
    """
    times = [time_s for _, time_s in history.named("time_s")][-11:]
    if not num_steps or num_steps <= history.last_step or len(times) < 2:
        return None
    pace_s = median(later - earlier for earlier, later in pairwise(times))
    return (num_steps - history.last_step) * max(0.0, pace_s)
