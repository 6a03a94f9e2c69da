"""Know what a rollout is doing, so that the error of a deadline can name it.

It is known to the task that plays the rollout, and to the tasks and threads that this one starts.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from telescope_core.base.code_places import is_authors, location_of


class Doings:
    """What one rollout is doing at present, until `deadline` stops it."""

    def __init__(self) -> None:
        self.deadline: asyncio.Timeout | None = None
        """What it did when this expired is kept."""
        self.under_way: list[doing] = []

    def latest(self) -> str:
        """Return what began last, such as `reward A.b (a.py:7) ran`; empty if that is unknown."""
        for one in reversed(self.under_way):
            if one.method is None:
                return one.what
            if is_authors(one.method):
                return f"{one.what} {location_of(one.method)} ran"
        return ""


_current: ContextVar[Doings | None] = ContextVar("telescope_doing", default=None)


@contextmanager
def knowing_doings() -> Generator[Doings, None, None]:
    """Know what is done in the block with `doing`."""
    token = _current.set(doings := Doings())
    try:
        yield doings
    finally:
        _current.reset(token)


class doing:
    """Context manager: `method`, whose role is `what`, runs; or without a method, what happens."""

    __slots__ = ("_doings", "method", "what")

    def __init__(self, what: str, method: Callable[..., Any] | None = None) -> None:
        self.what = what
        self.method = method
        self._doings = _current.get()

    def __enter__(self) -> None:
        if self._doings is not None:
            self._doings.under_way.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        doings = self._doings
        if doings is None:
            return
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if is_cancelled and doings.deadline is not None and doings.deadline.expired():
            return
        # A thread may end after the rollout that it belonged to.
        with suppress(ValueError):
            doings.under_way.remove(self)
