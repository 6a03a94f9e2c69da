"""Playing one rollout: prompt, turns, reward. The one place where environment code may fail.

Whatever an environment, its reward functions or the endpoint raise becomes a failed rollout with
the reason in `error`; it never becomes a reward.
"""

import asyncio
import time
from dataclasses import replace

from telescope_core.environments.base import Environment
from telescope_core.environments.episode import Episode
from telescope_core.environments.rewards import call
from telescope_core.errors import RewardError
from telescope_core.protocols import PlayRequest, Policy
from telescope_core.types import Example, Group, Message, Rollout, RolloutStatus, StopReason


async def play_rollout(
    environment: Environment, name: str, request: PlayRequest, policy: Policy
) -> Rollout:
    """Play and score `request`; cancellation propagates, every other failure is in the result."""
    rollout = Rollout(
        environment=name, example_id="", group_id=request.group_id, index=request.index
    )
    episode: Episode | None = None
    is_played = False
    try:
        async with asyncio.timeout(request.deadline_s):
            source = environment.examples(request.split)
            example = source.example(request.example_index)
            rollout = replace(rollout, example_id=example.id)
            episode = Episode(
                example,
                environment.initial_messages(example),
                policy=policy,
                sampling=request.sampling,
            )
            stop_reason = await environment.play(episode)
            rollout = replace(_snapshot(rollout, episode), stop_reason=stop_reason)
            is_played = True
            return await score_rollout(environment, rollout, example)
    except TimeoutError as error:
        text = str(error) or f"rollout exceeded its deadline of {request.deadline_s:g} s"
        return _failed(_snapshot(rollout, episode), StopReason.TIMEOUT, f"TimeoutError: {text}")
    except Exception as error:  # noqa: BLE001 - a boundary: a failed rollout is data with a reason
        text = f"{type(error).__name__}: {error}"
        failed = _failed(_snapshot(rollout, episode), StopReason.ERROR, text)
        where = "reward" if is_played else "play"
        return replace(failed, tags={**failed.tags, "failed_in": where})


async def score_rollout(environment: Environment, rollout: Rollout, example: Example) -> Rollout:
    """Return `rollout` with its reward, rewards by name and metrics."""
    started_s = time.monotonic()
    total, rewards, metrics = await environment.score(rollout, example)
    return replace(
        rollout,
        reward=total,
        rewards=rewards,
        metrics=metrics,
        score_s=time.monotonic() - started_s,
    )


async def score_group(environment: Environment, group: Group, example: Example) -> Group:
    """Add the group rewards to every scored rollout of `group`."""
    functions = [f for f in environment.score_functions if f.kind == "group_reward"]
    scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
    if not functions or not scored:
        return group
    totals = [rollout.reward or 0.0 for rollout in scored]
    parts: list[dict[str, float]] = [dict(rollout.rewards) for rollout in scored]
    for function in functions:
        values = await call(getattr(environment, function.name), tuple(scored), example)
        if not isinstance(values, list | tuple) or len(values) != len(scored):  # pyright: ignore[reportUnknownArgumentType]
            raise RewardError(
                f"group_reward {function.name} must return one number per rollout "
                f"({len(scored)}), got {values!r}"
            )
        for index, value in enumerate(values):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            parts[index][function.name] = float(value)  # pyright: ignore[reportUnknownArgumentType]
            totals[index] += function.weight * float(value)  # pyright: ignore[reportUnknownArgumentType]
    by_index = {
        rollout.index: replace(rollout, reward=total, rewards=part)
        for rollout, total, part in zip(scored, totals, parts, strict=True)
    }
    for total in totals:
        environment.check_range(total)
    return replace(
        group, rollouts=tuple(by_index.get(rollout.index, rollout) for rollout in group.rollouts)
    )


async def play_gold(environment: Environment, name: str, example: Example) -> Rollout | None:
    """Score the gold answer as if a policy had written it; None when there is none."""
    gold = environment.gold_answer(example)
    if gold is None:
        return None
    messages = (*environment.initial_messages(example), Message(role="assistant", content=gold))
    rollout = Rollout(
        environment=name, example_id=example.id, group_id="gold", index=0, messages=messages
    )
    return await score_rollout(environment, rollout, example)


def _snapshot(rollout: Rollout, episode: Episode | None) -> Rollout:
    if episode is None:
        return rollout
    return replace(
        rollout,
        messages=tuple(episode.messages),
        turns=tuple(episode.turns),
        tags=dict(episode.tags),
        metrics=dict(episode.metrics),
    )


def _failed(rollout: Rollout, stop_reason: StopReason, error: str) -> Rollout:
    return replace(
        rollout,
        status=RolloutStatus.FAILED,
        status_reason=error.split(":", 1)[0],
        stop_reason=stop_reason,
        error=error,
        reward=None,
    )
