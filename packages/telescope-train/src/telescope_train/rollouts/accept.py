"""Decide which groups are worth training on: `should_accept_fn`, and the built-in function.

A function takes a Group and returns True to keep it, False to reject it, or a text that is the
reason for rejecting it. New draws replace rejected groups, so the batch stays full.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial, update_wrapper
from typing import TypeAlias

from telescope_core.base.errors import ConfigError, nearest
from telescope_core.base.types import Group, RolloutStatus
from telescope_train.rollouts.compared import RewardScale, any_k_alike, is_told_apart

AcceptFn: TypeAlias = Callable[[Group], bool | str]

REJECTED = "rejected"
"""The recorded reason if the function gives none."""


def has_signal(group: Group, scale: RewardScale | None = None) -> bool | str:
    """Accept a group with different rewards, or in which a seat of a match has different ones.

    `scale` is that of credit: only what is different on it changes the policy. None = the rewards
    as they are. Paper: arXiv:2503.14476, section 3.2 (dynamic sampling).
    """
    scored = [rollout for rollout in group.rollouts if rollout.reward is not None]
    scale = scale or RewardScale()
    if is_told_apart(scored, scale):
        return True
    return "any_k_alike" if any_k_alike(scored, scale) else "all_equal"


BUILT_IN = {
    "has_signal": has_signal,
    "telescope_train.accept:has_signal": has_signal,
    "telescope_train.rollouts.accept:has_signal": has_signal,
}
"""Name in the settings -> function; others are given as `module:function`."""
EXPECTED = "must be has_signal or module:function"


def load_accept_fn(path: str, scale: RewardScale | None = None) -> AcceptFn:
    """Return a built-in function, or import `module:function`; ConfigError when there is none.

    `scale` is the one of the config, for the built-in function.
    """
    if path in BUILT_IN:
        function = BUILT_IN[path]
        return update_wrapper(partial(function, scale=scale), function)
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError(f"should_accept_fn {EXPECTED}, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"should_accept_fn {path!r}: no module {error.name!r}; install its package, or put "
            "its folder on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = ", ".join(nearest(name, vars(module)))
        remedy = f"did you mean {near}?" if near else "give the name of one that it has"
        raise ConfigError(
            f"should_accept_fn {path!r}: {module_name} has no function {name!r}; {remedy}"
        )
    return function


def rejection(group: Group, accept: AcceptFn) -> str | None:
    """Return why `accept` rejects `group`; None when it accepts it."""
    verdict = accept(group)
    if isinstance(verdict, str) and verdict:
        return verdict
    if isinstance(verdict, bool):
        return None if verdict else REJECTED
    raise ConfigError(
        f"should_accept_fn must return True, False or the reason as a text, got {verdict!r} for "
        f"group {group.id!r}"
    )


def is_scored(group: Group) -> bool:
    """Return whether any rollout of `group` has a reward."""
    return any(rollout.reward is not None for rollout in group.rollouts)


def discarded(group: Group, reason: str) -> Group:
    """Return `group` with its finished rollouts marked as discarded for `reason`."""
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, status=RolloutStatus.DISCARDED, status_reason=reason)
            if rollout.status is RolloutStatus.KEPT
            else rollout
            for rollout in group.rollouts
        ),
    )
