"""Score a whole group: `@group_reward` methods see all rollouts of an example at once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from telescope_core.base.code_places import location_of
from telescope_core.base.errors import RewardError
from telescope_core.base.types import Example, Group
from telescope_core.environments.base import Environment
from telescope_core.environments.parameters import group_values_for
from telescope_core.environments.rewards import as_number
from telescope_core.environments.usage import counting


async def score_group(environment: Environment, group: Group, example: Example) -> Group:
    """Add the group rewards to every scored rollout of `group`."""
    functions = [f for f in environment.score_functions if f.kind == "group_reward"]
    scored = tuple(rollout for rollout in group.rollouts if rollout.reward is not None)
    if not functions or not scored:
        return group
    totals = [cast(float, rollout.reward) for rollout in scored]
    parts: list[dict[str, float]] = [dict(rollout.rewards) for rollout in scored]
    with counting() as usage:
        for function in functions:
            method = getattr(environment, function.name)
            names = function.parameters.names
            arguments = group_values_for(names, rollouts=scored, example=example)
            found = await environment.caller.one("group_reward", method, *arguments)
            for index, value in enumerate(_values(found, method, len(scored))):
                parts[index][function.name] = value
                totals[index] += function.weight * value
    spent = usage.metrics(share=1 / len(scored))
    for total in totals:
        environment.check_range(total)
    by_index = {
        rollout.index: replace(
            rollout,
            reward=total,
            rewards=part,
            metrics=_plus(rollout.metrics, spent),
            info=(*rollout.info, *usage.notes(turn=max(0, len(rollout.turns) - 1))),
        )
        for rollout, total, part in zip(scored, totals, parts, strict=True)
    }
    rollouts = tuple(by_index.get(rollout.index, rollout) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def _values(found: object, method: object, expected: int) -> list[float]:
    values = cast(Sequence[object], found) if isinstance(found, list | tuple) else ()
    what = f"group_reward {location_of(method)}"
    if len(values) != expected:
        raise RewardError(
            f"{what} must return a list of {expected} numbers, one for each rollout in `rollouts`, "
            f"got {found!r:.80}"
        )
    return [as_number(value, what=lambda: f"each value of {what}") for value in values]


def _plus(metrics: Mapping[str, float], spent: Mapping[str, float]) -> dict[str, float]:
    return {**metrics, **{name: metrics.get(name, 0.0) + value for name, value in spent.items()}}
