"""Check an environment class when it is defined, so that mistakes do not surface in a rollout."""

import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from telescope_core.base.code_places import is_authors, location_of, shown_path
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.secret_names import require_names, require_own_secrets
from telescope_core.environments.attribute_checks import check_names, check_values, is_number
from telescope_core.environments.calls import RUNS_IN, declared_place
from telescope_core.environments.hooks import Hook
from telescope_core.environments.parameters import OF_EPISODE
from telescope_core.environments.rewards import ScoreFunction
from telescope_core.environments.settings import EnvironmentConfig

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
    secrets: Any = getattr(cls, "secrets", ())
    require_names(secrets, class_location(cls))
    require_own_secrets(secrets, class_location(cls))
    check_names(cls, where=class_location(cls))
    check_values(cls, known=known, where=class_location(cls))
    _check_methods(cls)
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


def class_folder(cls: type) -> str:
    """Return the folder of a class's file; empty when it is not defined in a file."""
    try:
        return str(Path(inspect.getfile(cls)).parent)
    except (OSError, TypeError):
        return ""


def folder_defining(cls: type, name: str) -> Path:
    """Return the folder of the file in which `cls`, or a base class of it, defines `name`."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    return Path(class_folder(owner))


def require_rewards(cls: type, scores: tuple[ScoreFunction, ...]) -> None:
    """Raise EnvironmentLoadError when no method of `cls` gives a reward."""
    if any(score.kind != "metric" for score in scores):
        return
    raise EnvironmentLoadError(
        f"{class_location(cls)} has no reward, so every rollout would earn 0; mark a method with "
        "@reward, such as: @reward def correct(self, completion, answer): ..., or define "
        "compute_reward(self, rollout, example)"
    )


_SYNC = ("examples", "draw", "splits", "tools", "dataset_revisions", "opening", "initial_messages")
"""Methods that are called where nothing can be awaited."""
_ASYNC = ("close", "score", "first_messages", "find_stop")
"""Methods whose result is awaited."""
_TAKES = {
    "examples": ("split",),
    "draw": ("random",),
    "format_prompt": ("example",),
    "gold_answer": ("example",),
    "env_response": ("messages", "episode"),
    "play": ("episode",),
    "compute_reward": ("rollout", "example"),
    "score": ("rollout", "example", "episode"),
    "golden_answers": ("example",),
    "first_messages": ("example",),
    "initial_messages": ("example",),
    "opening": ("prompt",),
    "find_stop": ("episode",),
    "splits": (),
    "dataset_revisions": (),
    "tools": (),
    "close": (),
}
"""Methods that Telescope calls, with the arguments that it gives them."""


def _check_methods(cls: type) -> None:
    """Refuse a method that cannot be called as it will be, and a `State` that cannot be built."""
    for name, arguments in _TAKES.items():
        method: Any = vars(cls).get(name)
        if name == "draw" and is_authors(cast(Any, cls).examples):
            continue  # a method of the author's own
        if name == "tools" and not hasattr(cls, "function_tools"):
            continue  # likewise
        if inspect.isfunction(method) and not _accepts(method, 1 + len(arguments)):
            raise EnvironmentLoadError(
                f"{location_of(method)} must take ({', '.join(('self', *arguments))}); it takes "
                f"({', '.join(inspect.signature(method).parameters)})"
            )
    _check_colors(cls)
    state: Any = getattr(cls, "State", dict)
    if not (isinstance(state, type) and (state is dict or _accepts(state, 0))):
        raise EnvironmentLoadError(
            f"{class_location(cls)}: State must be a class that is built without arguments, such "
            f"as a dataclass whose fields have defaults, got {state!r}; set what depends on the "
            "example in a @setup method"
        )


def _check_colors(cls: type) -> None:
    """Refuse an `async def` where nothing is awaited, and a `def` where something is."""
    known = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name in _SYNC:
        method: Any = vars(cls).get(name)
        is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if is_async and name in known:
            waits = (
                "; it runs in a thread, where it may wait" if name in ("examples", "draw") else ""
            )
            raise EnvironmentLoadError(
                f"{location_of(method)} must be a plain method: def, not async def{waits}"
            )
    for name in _ASYNC:
        method = vars(cls).get(name)
        if inspect.isfunction(method) and not inspect.iscoroutinefunction(inspect.unwrap(method)):
            raise EnvironmentLoadError(
                f"{location_of(method)} must be async def, because it is awaited"
            )


def _accepts(function: Any, num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


def _check_score(cls: type, score: ScoreFunction) -> None:
    method: Any = getattr(cls, score.name)
    if score.parameters.problem:
        raise EnvironmentLoadError(f"{score.kind} {location_of(method)} {score.parameters.problem}")
    _check_numbers(score, f"{score.kind} {location_of(method)}")
    place = declared_place(method) or getattr(cls, "sync_runs_in", "thread")
    live = [name for name in score.parameters.names if name in OF_EPISODE]
    if place == "process" and live:
        raise EnvironmentLoadError(
            f"{score.kind} {location_of(method)} runs in a process, which only gets copies, so it "
            f'cannot take the {live[0]}; remove that parameter, or declare it @runs_in("thread")'
        )


def _check_numbers(score: ScoreFunction, where: str) -> None:
    low, high = score.range.low, score.range.high
    numbers = {"weight": score.weight, "low": low, "high": high}
    for name, value in numbers.items():
        if value is not None and not is_number(value):
            raise EnvironmentLoadError(
                f"{where}: {name} must be a finite number, got {value!r} ({type(value).__name__})"
            )
    if low is not None and high is not None and low > high:
        raise EnvironmentLoadError(f"{where}: low must not be above high, got {low:g}, {high:g}")


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
    if not is_number(hook.deadline_s) or hook.deadline_s <= 0:
        raise EnvironmentLoadError(
            f"cleanup {location_of(method)}: deadline_s must be a number above 0, got "
            f"{hook.deadline_s!r}"
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
