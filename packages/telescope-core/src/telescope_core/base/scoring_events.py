"""Notify the caller of a rollout when its scoring begins, also from another process.

The listener is known to the task that plays the rollout and to the tasks that this one starts, so
that no interface between them has to pass it on.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[], None]
_current: ContextVar[Listener | None] = ContextVar("telescope_scoring_news", default=None)


@contextmanager
def hearing_of_scoring(listener: Listener) -> Generator[None, None, None]:
    """Call `listener` when the rollout that is played inside the block begins to be scored.

    It is not called by workers of an earlier version, nor for rollouts that are never scored.
    """
    token = _current.set(listener)
    try:
        yield
    finally:
        _current.reset(token)


def who_hears_of_scoring() -> Listener | None:
    """Return the listener of the rollout that the current task plays; None = there is none."""
    return _current.get()


def scoring_begins() -> None:
    """Notify the listener, if there is one, that scoring of the rollout begins now."""
    listener = _current.get()
    if listener is not None:
        listener()
