"""Check an environment class when it is defined, so that mistakes do not surface in a rollout."""

import inspect
from difflib import get_close_matches
from typing import Any

from telescope_core.environments.calls import RUNS_IN, declared_place, location_of, shown_path
from telescope_core.environments.hooks import Hook
from telescope_core.environments.rewards import ScoreFunction
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.errors import EnvironmentLoadError
from telescope_core.secret_names import require_own_secrets

_MISSPELT = 0.9
"""Similarity, 0 to 1, above which an attribute is taken for a misspelled base class attribute."""


def check_class(
    cls: type, *, scores: tuple[ScoreFunction, ...], hooks: tuple[Hook, ...], known: set[str]
) -> None:
    """Raise EnvironmentLoadError for the first mistake, with its file and, if any, its line."""
    config: Any = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, EnvironmentConfig)):
        raise EnvironmentLoadError(
            f"{class_location(cls)}: Config must be a subclass of EnvironmentConfig, got "
            f"{config!r}; write: class Config(EnvironmentConfig)"
        )
    place: Any = getattr(cls, "sync_runs_in", None)
    if place not in RUNS_IN:
        raise EnvironmentLoadError(
            f"{class_location(cls)}: sync_runs_in must be one of {', '.join(RUNS_IN)}, "
            f"got {place!r}"
        )
    require_own_secrets(getattr(cls, "secrets", ()), class_location(cls))
    for score in scores:
        _check_score(cls, score)
    for hook in hooks:
        _check_hook(getattr(cls, hook.name), hook)
    _check_attributes(cls, known)


def class_location(cls: type) -> str:
    """Return `Name (file)` of a class."""
    try:
        return f"{cls.__qualname__} ({shown_path(inspect.getfile(cls))})"
    except (OSError, TypeError):
        return cls.__qualname__


def _check_score(cls: type, score: ScoreFunction) -> None:
    method: Any = getattr(cls, score.name)
    names = list(inspect.signature(method).parameters)[1:]
    first = "rollouts" if score.kind == "group_reward" else "rollout"
    allowed = (2,) if score.kind == "group_reward" else (2, 3)
    if len(names) not in allowed:
        more = "" if score.kind == "group_reward" else " and optionally episode"
        raise EnvironmentLoadError(
            f"{score.kind} {location_of(method)} must take (self, {first}, example){more}; "
            f"it takes (self{''.join(f', {name}' for name in names)})"
        )
    place = declared_place(method) or getattr(cls, "sync_runs_in", "thread")
    if place == "process" and score.takes_episode:
        raise EnvironmentLoadError(
            f"{score.kind} {location_of(method)} runs in a process, which only gets copies, so it "
            'cannot take the episode; remove that parameter, or declare it @runs_in("thread")'
        )


def _check_hook(method: Any, hook: Hook) -> None:
    names = list(inspect.signature(method).parameters)[1:]
    if len(names) != 1:
        raise EnvironmentLoadError(
            f"{hook.kind} {location_of(method)} must take (self, episode); "
            f"it takes (self{''.join(f', {name}' for name in names)})"
        )
    if declared_place(method) == "process":
        raise EnvironmentLoadError(
            f"{hook.kind} {location_of(method)} cannot run in a process, because it gets the "
            "episode itself and not a copy; run it in a thread, or make it async"
        )
    if hook.deadline_s <= 0:
        raise EnvironmentLoadError(
            f"cleanup {location_of(method)}: deadline_s must be above 0, got {hook.deadline_s:g}"
        )


def _check_attributes(cls: type, known: set[str]) -> None:
    """Refuse a class attribute that looks like a misspelled setting, such as `max_turn = 3`."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)} | known
    for name, value in vars(cls).items():
        if name.startswith("_") or name in inherited or callable(value):
            continue
        if isinstance(value, property | classmethod | staticmethod):
            continue
        close = get_close_matches(name, known, n=1, cutoff=_MISSPELT)
        if close:
            raise EnvironmentLoadError(
                f"{class_location(cls)}: nothing reads {name!r}; did you mean {close[0]!r}? "
                "(if the attribute is your own, rename it)"
            )
