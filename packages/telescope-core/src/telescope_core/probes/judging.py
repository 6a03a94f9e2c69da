"""Turn played rollouts into findings: lowest reward, answers above it, differences. Pure.

The floor is measured: it is the least that saying nothing earns, and may be at most half of the way
to success. Junk answers may earn, on average, a quarter of the way from the floor to success, and
never success itself. Those that may be right by luck, such as another example's answer, may succeed
once in ten times.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from telescope_core.base.solved import REWARD_SLACK, is_solved
from telescope_core.base.types import Rollout, RolloutStatus, StopReason
from telescope_core.probes.answers import Answers
from telescope_core.probes.completions import (
    CHECK_OF_KIND,
    GOLD,
    GUESSES,
    HUGE,
    NOTHING,
    Try,
)
from telescope_core.probes.meter import Cut

MARGIN = 0.25
HIGHEST_FLOOR = 0.5
LUCK = 0.1
ENOUGH = 0.5
"""Share of the planned tries that must be completed before a check can pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One try with its rollout."""

    attempt: Try
    rollout: Rollout
    duration_s: float
    """Time on the wall."""
    own_s: float
    """Processor time of the environment, in seconds of the reference machine."""
    cut: Cut | None = None
    """Why it was ended early; None if it was not."""
    digest: str
    """Digest of the conversation."""

    @property
    def reward(self) -> float | None:
        """The reward; None if the rollout failed."""
        return self.rollout.reward

    @property
    def score(self) -> tuple[object, ...]:
        """The values that must be the same each time."""
        failure = self.rollout.error if self.rollout.status is RolloutStatus.FAILED else ""
        return (self.reward, tuple(sorted(self.rollout.rewards.items())), bool(failure))


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range of rewards that the environment declares."""

    low: float
    high: float
    success: float


def check_of_failure(error: str) -> str:
    """Return the check that the text of an error belongs to."""
    is_number = "finite number" in error and "RewardError" in error
    is_range = is_number or "outside its declared range" in error
    return "reward.range" if is_range else "reward.plays"


def judge_failures(played: Sequence[Played], answers: Answers) -> None:
    """Report failed rollouts, each under the check that its error belongs to.

    Without any reward, nothing is known of the range of rewards.
    """
    for one in played:
        if one.rollout.status is not RolloutStatus.FAILED:
            continue
        error = one.rollout.error or "failed"
        if one.rollout.stop_reason is StopReason.TIMEOUT:
            _judge_late(one, error, answers)
            continue
        _found(answers, check_of_failure(error), f"{one.attempt.kind} answer: {error}", one)
    answers.passed("reward.plays")
    if any(one.reward is not None for one in played):
        answers.passed("reward.range")


def _judge_late(one: Played, error: str, answers: Answers) -> None:
    """Report a rollout that took too long; only its own processor time can prove it at fault."""
    check = "reward.huge" if one.attempt.kind in HUGE else "reward.plays"
    spent = f"{one.attempt.kind} answer: the environment computed for {one.own_s:.1f} s"
    if one.cut is Cut.OWN:
        _found(answers, check, f"{spent}, which is too long for one rollout", one)
    else:
        answers.inconclusive(
            check,
            f"{spent} of {one.duration_s:.0f} s and had not ended ({error}): it waited for "
            "something, or the machine was busy",
        )


def require_enough(
    planned: Sequence[Try], tried: Iterable[Played], checks: Iterable[str], answers: Answers
) -> None:
    """Report the checks for which less than half of the planned rollouts were completed."""
    wanted: Counter[str] = Counter()
    done: Counter[str] = Counter()
    ended = [one.attempt for one in tried if one.cut is None]
    for check in checks:
        for counts, tries in ((wanted, planned), (done, ended)):
            counts[check] = sum(_is_for(check, one.kind) for one in tries)
        if done[check] < ENOUGH * wanted[check]:
            answers.inconclusive(
                check, f"only {done[check]} of {wanted[check]} rollouts were tried in the time"
            )


def _is_for(check: str, kind: str) -> bool:
    """Return whether `check` needs a rollout with an answer of this kind."""
    if check in ("reward.gold", "reward.has_gold"):
        return kind == GOLD
    if check == "reward.floor":
        return kind in NOTHING
    return check not in CHECK_OF_KIND.values() or CHECK_OF_KIND.get(kind) == check


def judge_gold(
    played: Sequence[Played], declared: Range, answers: Answers, *, is_planned: bool
) -> None:
    """Report gold answers that earn less than the maximum, or that there is no gold answer."""
    golds = [one for one in played if one.attempt.kind == GOLD]
    if not is_planned:
        answers.found("reward.has_gold", "gold_answer returns None for every example tried")
        answers.not_applicable("reward.gold", "there is no gold answer")
        return
    answers.passed("reward.has_gold")
    for one in golds:
        if one.reward is None:
            continue
        wanted = max(declared.high, declared.success)
        if not is_solved(one.reward, wanted):
            _found(answers, "reward.gold", f"earns {one.reward:g} of {declared.high:g}", one)
    if any(one.reward is not None for one in golds):
        answers.passed("reward.gold")
    else:
        answers.not_run("reward.gold", "no gold answer could be scored")


def judge_junk(played: Sequence[Played], declared: Range, answers: Answers) -> None:
    """Measure the lowest reward, and report junk answers that earn too much above it."""
    by_kind: defaultdict[str, list[tuple[float, Played]]] = defaultdict(list)
    for one in played:
        if one.reward is not None and one.attempt.kind != GOLD:
            by_kind[one.attempt.kind].append((one.reward, one))
    nothing = [reward for kind in NOTHING for reward, _ in by_kind[kind]]
    floor = min(nothing, default=declared.low)
    answers.fact("reward_floor", floor)
    if floor > declared.low + HIGHEST_FLOOR * (declared.success - declared.low) + REWARD_SLACK:
        answers.found(
            "reward.floor",
            f"doing nothing earns at least {floor:g}; success is {declared.success:g} of "
            f"[{declared.low:g}, {declared.high:g}]",
        )
    if nothing:
        answers.passed("reward.floor")
    else:
        answers.not_run("reward.floor", "no empty answer could be scored")
    for kind, check in CHECK_OF_KIND.items():
        if by_kind[kind]:
            _judge_kind(check, by_kind[kind], floor, declared, answers)
            answers.passed(check)
        elif not any(one.attempt.kind == kind for one in played):
            answers.not_applicable(check, "there is no such answer for the examples tried")
        else:
            answers.not_run(check, "none of these answers could be scored")


def _judge_kind(
    check: str,
    scored: list[tuple[float, Played]],
    floor: float,
    declared: Range,
    answers: Answers,
) -> None:
    kind = scored[0][1].attempt.kind
    scored = sorted(scored, key=lambda pair: -pair[0])
    num_solved = sum(is_solved(reward, declared.success) for reward, _ in scored)
    luck = max(1, math.floor(LUCK * len(scored))) if kind in GUESSES else 0
    mean = sum(reward for reward, _ in scored) / len(scored)
    span = declared.success - floor
    if num_solved > luck:
        text = f"{num_solved} of {len(scored)} {kind} answers count as solved; this one earns"
    elif span > 0 and mean > floor + MARGIN * span + REWARD_SLACK:
        text = f"{kind} answers earn {mean:.3g} on average, the floor is {floor:g}; this one earns"
    else:
        return
    for reward, one in scored[:3]:
        _found(answers, check, f"{text} {reward:g}", one)


def judge_same(
    check: str, first: Mapping[str, Played], later: Iterable[Played], how: str, answers: Answers
) -> None:
    """Report tries whose score differs from the first time."""
    for one in later:
        before = first.get(one.attempt.key)
        if before is not None and before.score != one.score:
            _found(answers, check, f"{_shown(before)} at first, {_shown(one)} {how}", one)
    answers.passed(check)


def _shown(one: Played) -> str:
    return f"earned {one.reward:g}" if one.reward is not None else f"failed: {one.rollout.error}"


def _found(answers: Answers, check: str, text: str, one: Played) -> None:
    attempt = one.attempt
    answers.found(
        check,
        text,
        example_id=attempt.asked.example.id,
        completion="\n---\n".join(attempt.replies),
    )
