"""Check an environment class when it is defined, build it, and check what was built.

Mistakes in values, names and methods must not surface in a rollout.
"""

import inspect
import math
import os
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, cast

from telescope_core.base.code_places import (
    is_authors,
    is_own_module,
    location_of,
    raised_at,
    shown_path,
)
from telescope_core.base.errors import (
    CodeExitError,
    EnvironmentLoadError,
    StrayCancelError,
    TelescopeError,
)
from telescope_core.base.secret_names import link_advice, require_names, require_own_secrets
from telescope_core.environments.author_errors import contained
from telescope_core.environments.calls import RUNS_IN, declared_place
from telescope_core.environments.hooks import MARKS, Hook
from telescope_core.environments.rewards import OF_EPISODE, ScoreFunction
from telescope_core.environments.settings import EnvironmentConfig

NETWORKS = ("none", "load", "always")
_PLAIN_METHODS = ("function", "method_descriptor", "classmethod", "staticmethod")


class _Kind(NamedTuple):
    fits: Callable[[Any], bool]
    text: str
    """Words for the expected value, for the message."""


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number; True and False are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_answer(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


_NUMBER = _Kind(is_number, "a finite number")
_COUNT = _Kind(_is_count, "a whole number that is at least 1")
_KINDS: Mapping[str, _Kind] = {
    "system_prompt": _Kind(_is_text, "text"),
    "network": _Kind(NETWORKS.__contains__, f"one of {', '.join(NETWORKS)}"),
    "needs_answer": _Kind(_is_answer, "True, False or None"),
    "reward_min": _NUMBER,
    "reward_max": _NUMBER,
    "success_threshold": _NUMBER,
    "max_turns": _COUNT,
    "max_threads": _COUNT,
    "max_processes": _COUNT,
}


def check_values(owner: type, *, known: set[str], where: str) -> None:
    """Raise EnvironmentLoadError for a class attribute of the wrong kind."""
    for name, value in vars(owner).items():
        if name not in _KINDS or name not in known:
            continue
        # Only an instance has the value of a property, and `check_built` looks at it there.
        is_computed = hasattr(value, "__get__") and type(value).__name__ not in _PLAIN_METHODS
        if not is_computed:
            _require(name, value, where)


def check_built(environment: object, *, known: set[str], where: str) -> None:
    """Raise EnvironmentLoadError for an attribute that a built environment cannot be played with.

    It may have been set in the class, in the constructor, or by a property.
    """
    one: Any = environment
    for name in _KINDS:
        if name not in known:
            continue
        try:
            with contained():
                value = getattr(one, name)
        except Exception as error:
            raise raised_by(f"{where}: {name}", error) from error
        _require(name, value, where)
    low, high, success = one.reward_min, one.reward_max, one.success_threshold
    if not low < high:
        raise EnvironmentLoadError(
            f"{where}: reward_min must be below reward_max, got {low:g} and {high:g}"
        )
    if not low < success <= high:
        what = "no rollout could" if success > high else "every rollout would"
        raise EnvironmentLoadError(
            f"{where}: {what} count as solved, because success_threshold is {success:g} and "
            f"rewards go from {low:g} to {high:g}; set success_threshold to the reward of a "
            "rollout that solves its example"
        )


def check_names(owner: type, *, where: str) -> None:
    """Refuse the author's names that Telescope's own classes already use for something else."""
    own = _own_members(owner) if not is_own_module(owner.__module__) else {}
    for name, value in vars(owner).items():
        if name not in own:
            continue
        function = getattr(value, "__func__", value)
        if _marks(function) and not _marks(own[name]):
            kind = _kind_of(function)
            raise EnvironmentLoadError(
                f"{kind} {location_of(function)}: Telescope's own {name!r} would be replaced by "
                f"it; give it another name, such as {name}_{kind}"
            )
        if callable(own[name]) and not (callable(value) or hasattr(value, "__get__")):
            advice = f"write: def {name}(self, ...)"
            if name == "examples":
                advice = "give a list or a file as `data`, or write: def examples(self, split)"
            raise EnvironmentLoadError(
                f"{where}: {name} must be a method, got {value!r:.80} ({type(value).__name__}); "
                f"{advice}"
            )


def _marks(function: object) -> set[str]:
    """Return the names of the decorators that have marked a method."""
    return MARKS & set(getattr(function, "__dict__", ()))


def _kind_of(marked: object) -> str:
    """Return the name of the decorator that has marked a method, such as `reward`."""
    return getattr(getattr(marked, min(_marks(marked))), "kind", "tool")


def _own_members(owner: type) -> dict[str, object]:
    """Return the public names that Telescope's bases of `owner` define, with their values."""
    found: dict[str, object] = {"config": None}
    for base in reversed(owner.__mro__):
        if is_own_module(base.__module__):
            declared = {*vars(base), *getattr(base, "__annotations__", {})}
            found |= {name: vars(base).get(name) for name in sorted(declared) if name[0] != "_"}
    return {name: value for name, value in found.items() if not isinstance(value, type)}


def _require(name: str, value: object, where: str) -> None:
    kind = _KINDS[name]
    if kind.fits(value):
        return
    got = f"{value!r:.80} ({type(value).__name__})"
    advice = ""
    if callable(value):
        got, advice = "a method", "; make it a @property if it has to be computed"
    elif isinstance(value, bytes):
        advice = "; decode it: value.decode()"
    raise EnvironmentLoadError(f"{where}: {name} must be {kind.text}, got {got}{advice}")


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
    _check_marks(cls)
    _check_methods(cls)
    _check_places(cls, {"compute_reward", *(score.name for score in scores)})
    for score in scores:
        _check_score(cls, score)
    for hook in hooks:
        _check_hook(getattr(cls, hook.name), hook)
    for name, close in _similar(cls, known):
        if name not in known:
            raise EnvironmentLoadError(
                f"{class_location(cls)}: nothing reads {name!r}; did you mean {close!r}? "
                "(if the attribute is your own, rename it)"
            )


def _check_marks(cls: type) -> None:
    """Refuse a marked method that would not count: hidden, replaced, or a tool without a caller."""
    found: dict[str, object] = {}
    for owner in reversed(cls.__mro__):
        for name, member in vars(owner).items():
            inner = next((getattr(member, one) for one in _INNER if hasattr(member, one)), member)
            if _marks(member):
                found[name] = member
            elif _marks(inner):
                kind = _kind_of(inner)
                raise EnvironmentLoadError(
                    f"{kind} {location_of(inner)}: @{type(member).__name__} above @{kind} hides "
                    "it, so that it would not count; remove that, and let the method take self"
                )
            elif name in found and (callable(member) or hasattr(member, "__get__")):
                kind = _kind_of(found[name])
                weight = getattr(getattr(found[name], min(_marks(found[name]))), "weight", 1.0)
                mark = f"@{kind}" if kind == "metric" or weight == 1 else f"@{kind}({weight=:g})"
                raise EnvironmentLoadError(
                    f"{location_of(inner)} replaces the {kind} {location_of(found[name])} and is "
                    f"not marked itself; write {mark} above it, or {name} = None to do without"
                )
            else:
                found.pop(name, None)
    for one in found.values():
        if _kind_of(one) != "tool":
            continue
        _require_no_generator(one, "tool")
        if not hasattr(cls, "function_tools"):
            raise EnvironmentLoadError(
                f"tool {location_of(one)}: {class_location(cls)} has no tools, so that nothing "
                f"would call it; write: class {cls.__name__}(ToolEnvironment)"
            )


_INNER = ("__func__", "fget", "func")
"""Attributes in which a static method, a property and a cached one keep the function in them."""


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


def _check_places(cls: type, of_scores: set[str]) -> None:
    """Refuse a place in which a method cannot run, or that nothing would read."""
    for name, method in vars(cls).items():
        declared = declared_place(method)
        if declared == "process" and name not in of_scores:
            raise EnvironmentLoadError(
                f"{location_of(method)} cannot run in a process, because only rewards and metrics "
                "do, which get copies; run it in a thread, or make it async"
            )
        is_tool = bool(_marks(method)) and _kind_of(method) == "tool"
        if is_tool and declared == "loop" and not inspect.iscoroutinefunction(method):
            raise EnvironmentLoadError(
                f"tool {location_of(method)} runs in a thread, because it may wait; make it async, "
                'or remove @runs_in("loop")'
            )


def _accepts(function: Any, num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return False
    return True


def _require_no_generator(method: Any, kind: str) -> None:
    """Refuse a marked method with a `yield`: calling it runs none of it, and nothing iterates."""
    if not (inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)):
        return
    advice = "return the value instead"
    if kind in ("setup", "cleanup"):
        advice = "put what stands before the yield into @setup, and what follows it into @cleanup"
    elif kind == "tool":
        advice = "return a list instead"
    raise EnvironmentLoadError(
        f"{kind} {location_of(method)} has a yield, which makes it a generator: a call of it runs "
        f"none of its code; {advice}"
    )


def _check_score(cls: type, score: ScoreFunction) -> None:
    method: Any = getattr(cls, score.name)
    _require_no_generator(method, score.kind)
    if score.parameters.problem:
        raise EnvironmentLoadError(f"{score.kind} {location_of(method)} {score.parameters.problem}")
    _check_numbers(score, f"{score.kind} {location_of(method)}")
    if score.name == "mean" or (score.kind == "metric" and score.name == "reward"):
        whose = "mean reward of the environment" if score.name == "mean" else "rollout's total"
        raise EnvironmentLoadError(
            f"{score.kind} {location_of(method)}: {score.name!r} is the name of the {whose} in "
            f"results and curves; give it another name, such as {score.name}_{score.kind}"
        )
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
    _require_no_generator(method, hook.kind)
    names = list(inspect.signature(method).parameters)[1:]
    if len(names) != 1:
        raise EnvironmentLoadError(
            f"{hook.kind} {location_of(method)} must take (self, episode); "
            f"it takes (self{''.join(f', {name}' for name in names)})"
        )
    if not is_number(hook.deadline_s) or hook.deadline_s <= 0:
        raise EnvironmentLoadError(
            f"cleanup {location_of(method)}: deadline_s must be a number above 0, got "
            f"{hook.deadline_s!r}"
        )


def require_none_of(cls: type, foreign: set[str], *, reason: str) -> None:
    """Refuse a class attribute that is, or looks like, one of `foreign`: those of other classes."""
    for name, _ in _similar(cls, foreign):
        raise EnvironmentLoadError(
            f"{class_location(cls)}: nothing reads {name!r}: {reason} (if the attribute is your "
            "own, rename it)"
        )


def _similar(cls: type, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the new attributes of `cls` with the name in `known` that each resembles."""
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    for name, value in vars(cls).items():
        if name.startswith("_") or name in inherited or callable(value):
            continue
        if isinstance(value, property | classmethod | staticmethod):
            continue
        for close in get_close_matches(name, known, n=1, cutoff=_MISSPELT):
            yield name, close


def built(cls: type, config: object) -> Any:
    """Return `cls(config)`; any error of its constructor becomes an EnvironmentLoadError."""
    constructor: Any = cls.__init__
    where = location_of(constructor) if is_authors(constructor) else class_location(cls)
    try:
        inspect.signature(constructor).bind(None, config)
    except TypeError:
        takes = ", ".join(inspect.signature(constructor).parameters)
        raise EnvironmentLoadError(
            f"{where} must take (self, config=None), because it is called with the settings; it "
            f"takes ({takes}); make what it needs a field of Config"
        ) from None
    with told_of(where):
        return cls(config)


@contextmanager
def told_of(where: str, module: str = "") -> Generator[None, None, None]:
    """Raise any error of an author's code in the block as an EnvironmentLoadError of `where`.

    `module` is the author's, where a framework stands between.
    """
    try:
        with contained():
            yield
    except (CodeExitError, StrayCancelError) as error:
        raise EnvironmentLoadError(f"{where}: {error}") from error
    except TelescopeError:
        raise
    except Exception as error:
        raise raised_by(where, error, module) from error


def raised_by(what: str, error: Exception, module: str = "") -> EnvironmentLoadError:
    """Return an error that says what an author's code, such as a constructor, raised and where."""
    while isinstance(error, ExceptionGroup):  # its message only counts what is in it
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    text = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
    said = f"{what} raised {text}{raised_at(error, module)}"
    return EnvironmentLoadError(f"{said}{_advice(error, said, is_linked=bool(module))}")


def _advice(error: Exception, said: str, *, is_linked: bool) -> str:
    """Return what to do where `error`, which `said` tells, is a missing variable; else nothing.

    Environments of Telescope declare those that they read; for others, the link names them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_of_system = bool(frames) and frames[-1].filename in (os.__file__, "<frozen os>")
    if not isinstance(error, KeyError) or not is_of_system:
        return link_advice(said, os.environ) if is_linked else ""
    if is_linked:
        return (
            f"; there is no variable {error} here: the environment sees only those that its link "
            f"names: telescope env link --secret {error.args[0]}"
        )
    return (
        f"; there is no environment variable {error}: set it, and declare it by "
        f"secrets = ({error},), because an environment's own process gets those that it declares"
    )


def require_built(environment: Any, *, known: set[str]) -> None:
    """Raise EnvironmentLoadError when `environment` cannot be played as it was built."""
    cls = cast(type[Any], type(environment))
    where = class_location(cls)
    if "config" not in vars(environment):
        constructor: Any = cls.__init__
        raise EnvironmentLoadError(
            f"{location_of(constructor)} must begin with super().__init__(config), which sets "
            "self.config and what else playing needs"
        )
    for one in (*environment.score_functions, *environment.hooks):
        if one.name in vars(environment):
            raise EnvironmentLoadError(
                f"{where}: self.{one.name} is set, which hides the {one.kind} of that name; "
                "rename one of the two"
            )
    check_built(environment, known=known, where=where)
