"""Check what `play` and `@stop` methods return, so that nothing is taken for what it is not."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from telescope_core.environments.calls import location_of
from telescope_core.environments.episode import Episode
from telescope_core.errors import EnvironmentLoadError
from telescope_core.types import StopReason


def started_play(play: Callable[[Episode[Any]], Any], episode: Episode[Any]) -> Any:
    """Return what calling `play` gives if it can be awaited; nothing was asked before that."""
    started = play(episode)
    if inspect.isawaitable(started):
        return started
    episode.forget_requests()
    raise EnvironmentLoadError(
        f"{location_of(play)} must be a coroutine, because it waits for the policy; write "
        "`async def play(self, episode)` and `await episode.generate()`"
    )


def stop_reason_of(value: object, *, play: Callable[..., Any], episode: Episode[Any]) -> StopReason:
    """Return the stop reason that `play` returned; None stands for the usual one.

    The usual one is `length` if the last turn was cut, and `completed` otherwise.
    """
    places = episode.forget_requests()
    if places:
        raise EnvironmentLoadError(
            f"{location_of(play)}: generate() was called without await at {', '.join(places)}, so "
            "the policy was never asked; write: await episode.generate()"
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
    """Return what a `@stop` method said; text, a number or a list is not an answer."""
    plain: Any = getattr(value, "item", lambda: value)()
    if plain is None or isinstance(plain, bool):
        return bool(plain)
    raise EnvironmentLoadError(
        f"stop {location_of(method)} must return True or False, got {value!r:.80} "
        f"({type(value).__name__})"
    )


def as_floats(metrics: Mapping[str, object], *, play: Callable[..., Any]) -> dict[str, float]:
    """Return `metrics` with numbers of any kind as floats, which can be sent and saved."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(value, SupportsFloat):
            raise EnvironmentLoadError(
                f"{location_of(play)}: episode.metrics[{name!r}] must be a number, got "
                f"{value!r:.80} ({type(value).__name__}); texts belong in episode.tags"
            )
        found[name] = float(value)
    return found
