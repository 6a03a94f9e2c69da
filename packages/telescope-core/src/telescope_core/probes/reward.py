"""The probe of the reward level: play scripted answers in turn, again, at once, and too late."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Literal

from telescope_core.base.process_facts import resident_bytes
from telescope_core.base.scripted import ScriptedClient
from telescope_core.base.types import Rollout
from telescope_core.environments import Environment
from telescope_core.environments.loop_watch import Block, LoopWatch
from telescope_core.finding.locate import load_environment_class
from telescope_core.playing.rollout import play_rollout
from telescope_core.probes.answers import Answers, Job, described
from telescope_core.probes.completions import CHECK_OF_KIND, GOLD, HUGE, ShownExample, Try, tries_of
from telescope_core.probes.guards import Guard, cut_off_network
from telescope_core.probes.judging import (
    Played,
    Range,
    check_of_failure,
    judge_failures,
    judge_gold,
    judge_junk,
    judge_same,
    require_enough,
)
from telescope_core.probes.meter import Limits, Meter, MeteredSpan, WaitClock, slowness
from telescope_core.probes.near_gold import judge_near_gold
from telescope_core.probes.playing import (
    asked_of,
    play_at_once,
    play_group,
    play_in_turn,
    request_for,
    score_in_order,
)

_LATER = (
    "reward.near_gold",
    "reward.deterministic",
    "reward.concurrency",
    "reward.loop",
    "reward.deadline",
)
"""Checks that cannot run once a rollout had to be ended, because parts of it may still run."""
CHECKED = (
    "reward.plays",
    "reward.has_gold",
    "reward.gold",
    "reward.range",
    "reward.floor",
    *dict.fromkeys(CHECK_OF_KIND.values()),
    *_LATER,
)
NUM_AT_ONCE = 64
_TURN_S = 0.05
_BLOCK_S = 0.05
_NUM_REPEATED = 4
"""Examples of each split that are played again, here and in another process."""
_NUM_IN_GROUP = 6
"""Different answers in a group that is scored together; the first two are there twice."""
_IN_TURN = Limits(own_s=120.0, wall_s=300.0)
_AGAIN = Limits(own_s=30.0, wall_s=100.0)
_AT_ONCE = Limits(own_s=60.0, wall_s=200.0)
_DEADLINE_S, _GRACE_S, _NEVER_S = 0.1, 2.0, 3600.0


def run_reward(job: Job, answers: Answers) -> None:
    """Run the level, and report on all of its checks except the one that compares processes."""
    guard = Guard(writable=[], own_folders=job.own_folders())
    if job.cuts_network:
        cut_off_network()
        guard.watch_play()
    environment = load_environment_class(job.factory).from_settings(job.settings)
    own = next(iter(job.own_folders()), "")
    asyncio.run(check_rewards(environment, job.num_examples, answers, own_folder=own))
    for attempt in guard.seen("network", "play"):
        answers.found("reward.network", f"{attempt.where} reaches for {attempt.what}")
    if job.cuts_network:
        answers.passed("reward.network")
    else:
        answers.not_applicable("reward.network", "it declares that it needs the network")


async def score_again(environment: Environment, num_examples: int, answers: Answers) -> None:
    """Play the first examples, report the reward of each answer, and close the environment."""
    with answers.doing("reward.deterministic"):
        asked = await asked_of(environment, num_examples)
        tries = _again(list(tries_of(asked)))
        meter = Meter(slowness=slowness())
        _hand_over(await play_in_turn(environment, tries, meter, _AGAIN), answers)
    await environment.close()


async def check_rewards(
    environment: Environment,
    num_examples: int,
    answers: Answers,
    *,
    own_folder: str,
    meter: Meter | None = None,
) -> None:
    """Run the level with an environment that is built already, and close it.

    Only code below `own_folder` is blamed for blocking the event loop; any code if it is empty.
    `meter` measures the cost, by default that of this process.
    """
    meter = meter or Meter(slowness=slowness())
    answers.stage("reward.plays")
    blocks: list[Block] = []
    clock = WaitClock()
    clock.start()

    def keep(block: Block) -> None:
        if clock.own_s(block) > _BLOCK_S:
            blocks.append(block)

    watch = LoopWatch(own_folder=own_folder, threshold_s=_BLOCK_S, on_block=keep)
    watch.start()
    try:
        asked = await asked_of(environment, num_examples)
    except Exception as error:  # noqa: BLE001 - a boundary: whatever the author's code raises
        answers.found("reward.plays", described(error))
        for check in CHECKED[1:]:
            answers.not_run(check, "no rollout can begin")
        watch.stop()
        clock.stop()
        return
    extent = await _play_and_judge(environment, asked, meter, answers)
    if extent == "whole":
        answers.stage("reward.deadline")
        await _check_deadline(environment, asked[0], answers)
    watch.stop()
    clock.stop()
    for block in blocks:
        answers.found(
            "reward.loop", f"{block.culprit} blocked the loop for {block.duration_s * 1000:.0f} ms"
        )
    if extent != "unscored":
        answers.passed("reward.loop")
    await environment.close()


async def _play_and_judge(
    environment: Environment, asked: Sequence[ShownExample], meter: Meter, answers: Answers
) -> Literal["whole", "cut", "unscored"]:
    """Play and judge everything.

    Returns `cut` if a rollout had to be ended early, and `unscored` if none has a reward.
    """
    declared = Range(
        low=environment.reward_min,
        high=environment.reward_max,
        success=environment.success_threshold,
    )
    tries = list(tries_of(asked))
    first = await play_in_turn(environment, tries, meter, _IN_TURN)
    answers.fact("rollouts_tried", float(len(first)))
    answers.fact("rollouts_planned", float(len(tries)))
    if not any(one.cut is not None for one in first):
        await _check_groups(environment, first, answers)
    judge_failures(first, answers)
    judge_gold(first, declared, answers, is_planned=any(one.kind == GOLD for one in tries))
    judge_junk(first, declared, answers)
    junk = [check for check in CHECKED if check not in _LATER]
    require_enough(tries, first, junk, answers)
    is_cut = any(one.cut is not None for one in first)
    if not is_cut and all(one.reward is None for one in first):
        # Rollouts that all fail alike would pass for stable, prompt and of sound rewards.
        for check in ("reward.range", *_LATER):
            answers.not_run(check, "no rollout could be scored")
        return "unscored"
    near: list[Played] = []
    if not is_cut:
        answers.stage("reward.near_gold")
        near = await judge_near_gold(environment, asked, meter, answers)
        judge_failures(near, answers)
    if any(one.cut is not None for one in (*first, *near)):
        for check in _LATER[1 if near else 0 :]:
            answers.inconclusive(check, "a rollout before it had to be ended")
        return "cut"
    answers.stage("reward.deterministic")
    by_key = {one.attempt.key: one for one in first}
    repeated = _again(tries)
    again = await play_in_turn(environment, repeated, meter, _AGAIN)
    judge_same("reward.deterministic", by_key, again, "the second time", answers)
    require_enough(repeated, again, ["reward.deterministic"], answers)
    _hand_over(again, answers)
    answers.stage("reward.concurrency")
    # Answers whose rewards differ when repeated cannot be compared.
    unstable = {
        one.attempt.kind
        for one in again
        if one.attempt.key in by_key and by_key[one.attempt.key].score != one.score
    }
    plain = [
        attempt
        for attempt in tries
        if attempt.key in by_key and attempt.kind not in (*HUGE, *unstable)
    ]
    several = plain * (-(-2 * NUM_AT_ONCE // max(1, len(plain))))
    span = MeteredSpan(meter, _AT_ONCE)
    at_once = await play_at_once(environment, several, meter, _AT_ONCE, num_at_once=NUM_AT_ONCE)
    _measure(first, at_once, span.wall_s, answers)
    judge_same("reward.concurrency", by_key, at_once, "among 64 at once", answers)
    require_enough(several, at_once, ["reward.concurrency"], answers)
    return "whole"


async def _check_groups(
    environment: Environment, first: Sequence[Played], answers: Answers
) -> None:
    """Score a group of several rollouts, and the same in another order.

    Equal answers may be told apart by their place, so the rewards of each answer are compared.
    """
    if not any(function.kind == "group_reward" for function in environment.score_functions):
        return
    asked = first[0].attempt.asked
    sound = [one.attempt for one in first if one.reward is not None]
    tries = [one for one in sound if one.asked == asked and one.kind not in HUGE]
    tries = sorted(tries, key=lambda one: one.kind != GOLD)[:_NUM_IN_GROUP]
    try:
        rollouts = await play_group(environment, [*tries, *tries[:2]])
        placed = await score_in_order(environment, rollouts, asked.example)
        turned = await score_in_order(environment, rollouts[::-1], asked.example)
    except Exception as error:  # noqa: BLE001 - a boundary: whatever the author's code raises
        text = f"a group of several rollouts: {described(error)}"
        answers.found(check_of_failure(text), text, example_id=asked.example.id)
        return
    if _rewards_of_answers(placed) != _rewards_of_answers(turned):
        answers.found(
            "reward.deterministic",
            "a group in another order: rewards do not follow their rollouts",
            example_id=asked.example.id,
        )


def _rewards_of_answers(group: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return the rewards of each answer in a group, in their order, without rounding errors."""
    rewards: dict[str, list[float]] = {}
    for rollout in group:
        earned = rewards.setdefault(rollout.completion_text, [])
        earned.append(round(rollout.reward or 0.0, 6))
    return {answer: sorted(earned) for answer, earned in rewards.items()}


def _again(tries: Sequence[Try]) -> list[Try]:
    """Return the tries with the first examples of each split, except huge answers.

    They are in another order, so that a reward which depends on the rollout before is different.
    """
    head = [attempt for attempt in tries if attempt.asked.index < _NUM_REPEATED]
    same = [attempt for attempt in head if attempt.kind not in HUGE]
    return sorted(same, key=lambda attempt: attempt.kind)


def _hand_over(played: Sequence[Played], answers: Answers) -> None:
    answers.data(
        "scores",
        {
            one.attempt.key: [
                one.reward,
                sorted(one.rollout.rewards.items()),
                one.attempt.asked.example.id,
                one.attempt.replies[-1][:500],
            ]
            for one in played
        },
    )


def _measure(
    first: Sequence[Played], at_once: Sequence[Played], took_s: float, answers: Answers
) -> None:
    if took_s > 0:
        answers.fact("rollouts_per_second", round(len(at_once) / took_s, 1))
    times = [one.rollout.score_s for one in first if one.reward is not None]
    if len(times) > 1:
        answers.fact("reward_p99_ms", round(quantiles(times, n=100)[-1] * 1000, 2))
        answers.fact("reward_median_ms", round(quantiles(times, n=2)[0] * 1000, 2))
    slowest = max(first, key=lambda one: one.duration_s)
    answers.fact("slowest_rollout_s", round(slowest.duration_s, 3))
    answers.fact("memory_mb", round(resident_bytes() / 2**20, 1))


async def _check_deadline(environment: Environment, asked: ShownExample, answers: Answers) -> None:
    """Play with a policy that never answers, to the deadline and until it is cancelled."""
    never = ScriptedClient([""], delay_s=_NEVER_S).policy("never")
    request = replace(request_for(asked, "never"), deadline_s=_DEADLINE_S)
    cleanup_s = sum(hook.deadline_s for hook in environment.hooks if hook.kind == "cleanup")
    limit_s = _DEADLINE_S + cleanup_s + _GRACE_S
    late = asyncio.create_task(play_rollout(environment, "validated", request, never))
    if not await _ends_within(late, limit_s):
        answers.found(
            "reward.deadline",
            f"a rollout with a deadline of {_DEADLINE_S:g} s was still running after {limit_s:g} s",
            example_id=asked.example.id,
        )
    cancelled = asyncio.create_task(
        play_rollout(environment, "validated", replace(request, deadline_s=_NEVER_S), never)
    )
    await asyncio.wait([cancelled], timeout=0.05)
    cancelled.cancel()
    if not await _ends_within(cancelled, cleanup_s + _GRACE_S) or not cancelled.cancelled():
        answers.found(
            "reward.deadline",
            "a rollout that was cancelled kept running",
            example_id=asked.example.id,
        )
    answers.passed("reward.deadline")
    for task in (late, cancelled):
        task.cancel()


async def _ends_within(task: asyncio.Task[Rollout], limit_s: float) -> bool:
    """Wait for the end of `task`, for as many turns of the loop as fit into `limit_s` seconds.

    On a busy machine the turns are longer, for the rollout as for this.
    """
    for _ in range(round(limit_s / _TURN_S)):
        done, _ = await asyncio.wait([task], timeout=_TURN_S)
        if done:
            return True
    return False
