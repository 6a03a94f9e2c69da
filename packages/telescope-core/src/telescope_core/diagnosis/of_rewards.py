"""Rules about rewards, groups and answers: whether the run learns, and learns the right thing."""

import math
from collections.abc import Sequence
from statistics import fmean

from telescope_core.diagnosis.history import History, Stretch
from telescope_core.diagnosis.rule import Found, Rule


def nothing_trained(rule: Rule, history: History) -> Found:
    """Find that no optimizer step was taken."""
    trained = dict(history.named("loss/total"))
    steps = [(step, float(step in trained)) for step, _ in history.named("groups/total")]
    stretch = history.stretch(steps, lambda is_trained: not is_trained, least=5)
    if stretch is None or _is_solved(history, stretch):
        return
    yield rule.over(
        stretch,
        f"No optimizer step was taken in {stretch.last - stretch.first + 1} steps, because no "
        "group of rollouts had an advantage to learn from.",
        "See the reasons of the groups; an environment whose rewards never differ within a group "
        "teaches nothing. Try easier examples, a larger group_size, or a reward with more levels.",
        "optimizer/steps",
        "groups/discarded",
    )


_ROUNDING = 1e-12
"""Difference of rewards that are equal: sums of the same parts end a few units apart."""
_REASONS = {
    "groups/all_at_minimum": (
        "every rollout of theirs got the lowest reward",
        "The task is too hard for this model, or the reward does not accept right answers: read a "
        "few answers, try easier examples, a longer max_tokens, or a larger group_size.",
    ),
    "groups/all_at_maximum": (
        "every rollout of theirs got the highest reward",
        "The task is too easy for this model by now, or the reward accepts everything: read a few "
        "answers, and use harder examples.",
    ),
    "groups/all_equal": (
        "all of their rollouts got the same reward, which is neither the lowest nor the highest",
        "The reward does not tell answers apart: give it more levels, or check that it reads the "
        "answer.",
    ),
    "groups/any_k_alike": (
        "any pass_at_k of their rollouts hold one of the best",
        "The examples are easy for the best of that many answers: use harder ones, or a lower "
        "pass_at_k.",
    ),
}


def no_signal(rule: Rule, history: History) -> Found:
    """Find that hardly any group has an advantage."""
    wasted = history.share("groups/discarded", "groups/total")
    stretch = history.stretch(wasted, lambda share: share >= 0.8, least=5)
    if stretch is None or _is_solved(history, stretch):
        return
    shares = stretch.values(wasted)
    totals = {reason: sum(stretch.values(history.named(reason))) for reason in _REASONS}
    reason = max(totals, key=lambda one: totals[one])
    why, remedy = _REASONS[reason]
    if not totals[reason]:
        why, remedy = (
            "failures or filters left too few of their rollouts",
            ("See groups/too_few and groups/all_filtered, and what failed."),
        )
    yield rule.over(
        stretch,
        f"{sum(shares) / len(shares):.0%} of the groups taught nothing, mostly because {why}.",
        remedy,
        "groups/discarded",
        reason,
        rollouts={"group": "no_signal"},
    )


def _is_solved(history: History, stretch: Stretch) -> bool:
    """Return whether a run reached the highest rewards gradually, with nothing left to learn.

    A grader that says yes to everything from some step on makes a jump.
    """
    rewards = history.named("task_reward/mean")
    before = [value for step, value in rewards if step < stretch.first][-3:]
    during, solved, discarded = (
        stretch.values(history.named(name))
        for name in ("task_reward/mean", "groups/all_at_maximum", "groups/discarded")
    )
    if len(before) < 3 or not during or sum(solved) < 0.8 * sum(discarded):
        return False
    return fmean(before) >= 0.9 * fmean(during)


def one_reward(rule: Rule, history: History) -> Found:
    """Find that every rollout of every step got the same reward."""
    lows, highs = dict(history.named("reward/min")), dict(history.named("reward/max"))
    both = [(step, highs[step] - low) for step, low in lows.items() if step in highs]
    stretch = history.stretch(both, lambda spread: spread <= _ROUNDING, least=5)
    if stretch is None or _is_solved(history, stretch):
        return
    value = lows[stretch.last]
    if any(abs(low - value) > _ROUNDING for low in stretch.values(list(lows.items()))):
        return
    yield rule.over(
        stretch,
        f"Every rollout got the reward {value:g}.",
        "A reward that says the same of every answer is seldom meant: run `telescope env validate` "
        "on the environment, and read in the rollouts what it got to grade.",
        "reward/min",
        "reward/max",
    )


_AFTER_A_COLLAPSE = (
    "Go on from a checkpoint before it with a lower learning_rate (telescope train --fork RUN --at "
    "N); see whether entropy or length changed first, as the first of them is mostly the cause."
)


_ANSWERS_AS_BEFORE = (
    "Answers are as long as before, so see first whether the grader or the prompts have changed at "
    "that step: read what was asked and what was graded. Otherwise: "
)


def collapse(rule: Rule, history: History) -> Found:
    """Find that the reward was lost, of all environments together or of one."""
    metrics = ("task_reward/mean", "entropy", "completion_len/mean")
    lost = _lost_signal(history)
    if lost is not None:
        stretch, before, during = lost
        lengths = history.named("completion_len/mean")
        parts = [[v for s, v in lengths if (s < stretch.first) is early] for early in (True, False)]
        is_as_before = all(parts) and abs(fmean(parts[1]) / fmean(parts[0]) - 1) < 0.15
        yield rule.over(
            stretch,
            f"The reward fell from {before:.3g} to {during:.3g}, and hardly a group teaches any "
            "more.",
            _ANSWERS_AS_BEFORE + _AFTER_A_COLLAPSE if is_as_before else _AFTER_A_COLLAPSE,
            *metrics,
        )
        return
    for environment in [None, *history.environments]:
        metric = metrics[0] if environment is None else f"task_reward/{environment}/mean"
        if environment is not None and len(history.environments) < 2:
            continue
        change = history.from_best(metric)
        if change is None or not change.is_sure or change.before <= 0:
            continue
        if change.after > 0.5 * change.before:
            continue
        before = [step for step, _ in history.named(metric) if step < change.first_step]
        if change.before - change.after <= 4 * math.sqrt(_step_variance(history, before)):
            continue
        yield rule.since(
            change,
            history,
            f"The reward fell from {change.before:.3g} at its best to {change.after:.3g}.",
            _AFTER_A_COLLAPSE,
            metric,
            *metrics[1:],
            environment=environment,
        )


def _lost_signal(history: History) -> tuple[Stretch, float, float] | None:
    """Return since when hardly any group teaches, and the mean reward before that and since then.

    None if that is no fall of the reward by half and by three standard errors.
    """
    wasted = history.share("groups/discarded", "groups/total")
    stretch = history.stretch(wasted, lambda share: share >= 0.8, least=5)
    if stretch is None or stretch.is_over:
        return None
    rewards = history.named("task_reward/mean")
    both = [
        [(step, value) for step, value in rewards if (step < stretch.first) is is_before]
        for is_before in (True, False)
    ]
    if not all(both):
        return None
    before, during = (fmean(value for _, value in part) for part in both)
    variance = sum(_step_variance(history, [step for step, _ in part]) / len(part) for part in both)
    if during > 0.5 * before or before - during <= 3 * math.sqrt(variance):
        return None
    return stretch, before, during


def _step_variance(history: History, steps: Sequence[int]) -> float:
    """Return the mean variance of the mean reward of one of `steps`; 0 if not known.

    It is that of as many independent draws as there are groups, because rollouts of a group are
    alike.
    """
    spreads, groups = (dict(history.named(m)) for m in ("task_reward/std", "groups/total"))
    known = [
        spreads[step] ** 2 / max(1.0, groups.get(step, 1.0)) for step in steps if step in spreads
    ]
    return fmean(known) if known else 0.0


def parts_apart(rule: Rule, history: History) -> Found:
    """Find that one part of a reward rises while another falls: the easy one is learned instead."""
    for environment in history.environments:
        start = f"reward/{environment}/"
        parts = [f"{start}{name}" for name in history.parts(start) if name != "mean"]
        changes = {name: history.from_start(name) for name in parts}
        sure = {name: one for name, one in changes.items() if one is not None and one.is_sure}
        rising = [name for name, one in sure.items() if one.size > 0.1]
        falling = [
            name for name, one in sure.items() if one.size < -0.1 and one.after < 0.7 * one.before
        ]
        if not rising or not falling:
            continue
        up, down = rising[0], falling[0]
        yield rule.since(
            sure[down],
            history,
            f"{up.removeprefix(start)} rose from {sure[up].before:.2f} to {sure[up].after:.2f} "
            f"while {down.removeprefix(start)} fell from {sure[down].before:.2f} to "
            f"{sure[down].after:.2f}.",
            "The form is learned instead of the task: lower the weight of the first, or give it "
            "only together with the second.",
            up,
            down,
            environment=environment,
        )


def drowned(rule: Rule, history: History) -> Found:
    """Find that one environment of several takes nearly all of the gradient from the others."""
    for name in history.parts("signal/", "/share"):
        groups, others = (history.named(f"signal/{name}/{end}") for end in ("groups", "share"))
        num_of = dict(groups)
        # An environment without any gradient has another cause, such as equal rewards.
        drowning = [(step, 1 - share) for step, share in others if num_of.get(step, 1.0) < 0.8]
        stretch = history.stretch(drowning, lambda rest: 0.0 < rest < 0.05, least=5)
        if stretch is not None:
            share = fmean(stretch.values(others))
            yield rule.over(
                stretch,
                f"It has {share:.1%} of the gradient, and {num_of[stretch.last]:.0%} of the "
                "groups: what the other environments teach is lost in it.",
                "Its answers are far longer, or its rewards far larger: scale rewards with "
                "reward_min and reward_max of each environment, keep advantage_norm = "
                '"group", or lower its weight or max_tokens.',
                f"signal/{name}/share",
                f"signal/{name}/groups",
                environment=name,
            )


def failing_tools(rule: Rule, history: History) -> Found:
    """Find that most calls which reach a tool of an environment fail in the tool itself."""
    for name in history.environments:
        calls = dict(history.named(f"reward/{name}/tool_calls"))
        raised, late, *others = (
            dict(history.named(f"reward/{name}/tool_errors/{kind}"))
            for kind in (
                *("raised", "timed_out"),
                *("malformed", "unknown_tool", "bad_arguments", "refused"),
            )
        )
        # Calls that the policy got wrong never reach the tool.
        reached = {s: n - sum(one.get(s, 0.0) for one in others) for s, n in calls.items()}
        failed = [
            (step, (raised[step] + late.get(step, 0.0)) / number)
            for step, number in reached.items()
            if number >= 0.1 and step in raised
        ]
        stretch = history.stretch(failed, lambda share: share > 0.5, least=3)
        if stretch is not None:
            yield rule.over(
                stretch,
                "More than half of the calls that reached a tool raised an exception or did not "
                "end in time.",
                "The tools are broken, and the policy learns to do without them: read what a few "
                "calls were answered, and try the tool by itself.",
                f"reward/{name}/tool_errors/raised",
                f"reward/{name}/tool_errors/timed_out",
                environment=name,
            )
