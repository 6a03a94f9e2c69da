"""Check the values that an author's methods return, so that none is taken for something else."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat, cast

from telescope_core.base.code_places import location_of
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.terminal import whole
from telescope_core.base.types import Rollout, Split, StopReason
from telescope_core.environments.episode import Episode


def started_play(play: Callable[[Episode[Any]], Any], episode: Episode[Any]) -> Any:
    """Call `play` and return its awaitable; raises EnvironmentLoadError if it is not async."""
    started = play(episode)
    if inspect.isawaitable(started):
        return started
    episode.forget_requests()
    raise EnvironmentLoadError(
        f"{location_of(play)} must be a coroutine, because it waits for the policy; write "
        "`async def play(self, episode)` and `await episode.generate()`"
    )


def stop_reason_of(value: object, *, play: Callable[..., Any], episode: Episode[Any]) -> StopReason:
    """Return the stop reason that `play` returned, or the default one for None.

    The usual one is `length` if the last turn was cut, and `completed` otherwise.
    """
    places = episode.forget_requests()
    if places:
        raise EnvironmentLoadError(
            f"{location_of(play)}: generate() was called without await at {', '.join(places)}, so "
            "the policy was never asked; write: await episode.generate()"
        )
    if not episode.turns and not episode.has_given_endpoint:
        raise EnvironmentLoadError(
            f"{location_of(play)} ended without asking the policy for anything, so its reward "
            "would say nothing about the policy; call `await episode.generate()`, or give "
            "episode.endpoint to a program"
        )
    if value is None:
        was_cut = episode.turns and episode.turns[-1].completion.finish_reason == "length"
        return StopReason.LENGTH if was_cut else StopReason.COMPLETED
    try:
        return StopReason(value)  # pyright: ignore[reportArgumentType]
    except ValueError:
        raise EnvironmentLoadError(
            f"{location_of(play)} must return a StopReason such as StopReason.COMPLETED, or "
            f"nothing, got {value!r:.80}"
        ) from None


def as_truth(value: object, *, method: Callable[..., Any]) -> bool:
    """Return the result of a `@stop` method as a boolean; raises for text, a number or a list."""
    plain: Any = value if _has_axes(value) else getattr(value, "item", lambda: value)()
    if plain is None or isinstance(plain, bool):
        return bool(plain)
    raise EnvironmentLoadError(
        f"stop {location_of(method)} must return True or False, got {value!r:.80} "
        f"({type(value).__name__})"
    )


def as_floats(metrics: object, *, where: Callable[[], str]) -> dict[str, float]:
    """Return `metrics` with all numbers as floats, which can be sent and saved.

    `where` returns the place of what set them.
    """
    if not isinstance(metrics, Mapping):
        raise EnvironmentLoadError(
            f"{where()}: episode.metrics must be a dict of numbers, got {_shown(metrics)}"
        )
    found: dict[str, float] = {}
    for name, value in cast(Mapping[object, object], metrics).items():
        number = finite(value)
        if number is None:
            more = "; texts belong in episode.tags" if isinstance(value, str) else ""
            raise EnvironmentLoadError(
                f"{where()}: episode.metrics[{name!r}] must be a finite number, got "
                f"{_shown(value)}{more}"
            )
        found[str(name)] = number
    return found


def finite(value: object) -> float | None:
    """Return a number of any type as a float; None if it is no number or not finite."""
    # The check of a protocol takes longer than everything else here.
    if not isinstance(value, float | int) and (
        not isinstance(value, SupportsFloat) or _has_axes(value)
    ):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _has_axes(value: object) -> bool:
    """Whether this is an array, which is no single value even if it has one element."""
    return bool(getattr(value, "ndim", 0))


def as_named_texts(value: object, *, method: Callable[..., Any]) -> dict[str, str]:
    """Return the result of a method as texts by name."""
    if not isinstance(value, Mapping):
        raise EnvironmentLoadError(
            f"{location_of(method)} must return a dict of texts by name, got {_shown(value)}"
        )
    pairs = cast(Mapping[object, object], value).items()
    return {whole(str(name)): whole(str(text)) for name, text in pairs}


def checked_score(value: object, *, method: Callable[..., Any]) -> Rollout:
    """Return the rollout that `score` returned; raises unless it has a reward."""
    reward = finite(value.reward) if isinstance(value, Rollout) else None
    if not isinstance(value, Rollout) or reward is None:
        got = (
            f"a rollout with reward {value.reward!r}"
            if isinstance(value, Rollout)
            else _shown(value)
        )
        raise EnvironmentLoadError(
            f"{location_of(method)} must return the rollout with its reward, a finite number, such "
            f"as replace(rollout, reward=1.0), got {got}"
        )
    return value if type(value.reward) is float else replace(value, reward=reward)


def as_splits(value: object, *, method: Callable[..., Any]) -> tuple[Split, ...]:
    """Return the splits that `splits` returned; raises for other values."""
    parts = cast(Sequence[object], value) if isinstance(value, list | tuple) else ()
    names = [getattr(part, "value", part) for part in parts]
    if not names or any(name not in tuple(Split) for name in names):
        raise EnvironmentLoadError(
            f"{location_of(method)} must return a tuple of splits, such as (Split.TRAIN, "
            f"Split.EVAL) or (Split.EVAL,), got {_shown(cast(object, value))}"
        )
    return tuple(dict.fromkeys(Split(name) for name in names))


def gold_replies(value: object, *, method: Callable[..., Any]) -> list[str] | None:
    """Return the completions that `gold_answer` returned, one for each turn; None for none."""
    if value is None:
        return None
    replies = cast(Sequence[object], value) if isinstance(value, list | tuple) else (value,)
    if not replies or not all(isinstance(reply, str) for reply in replies):
        raise EnvironmentLoadError(
            f"{location_of(method)} must return text, a list of texts (one for each turn) or "
            f"None, got {_shown(cast(object, value))}"
        )
    return [str(reply) for reply in replies]


def _shown(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"
