"""Count what a rollout uses besides its policy, such as judges, and keep what judges say of it.

Code that uses a helper model calls `count`; the values become metrics. A judge's verdict goes
through `remark` and becomes a note. Both belong to the rollout or group that the current task plays
or scores, including its threads. Where helper models are forbidden, because they cost money,
`require_may_ask` raises.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from telescope_core.base.errors import NotAskedError
from telescope_core.base.types import TurnInfo

_MOST_REMARKS = 32
_LONGEST_REMARK = 4000


class Usage:
    """Sums of counted values, by metric name, and remarks in the order they were made."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._unknown: set[str] = set()
        self._remarks: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Add `value` to the sum of `name`."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0.0) + value

    def forget(self, names: Sequence[str]) -> None:
        """Leave the sums of `names` out, now and later, because a part of them is not known."""
        with self._lock:
            self._unknown.update(names)

    def add_remark(self, key: str, text: str) -> None:
        """Keep `text` under `key`; after a few dozen remarks, further ones are dropped."""
        with self._lock:
            if len(self._remarks) < _MOST_REMARKS:
                self._remarks.append((key, text[:_LONGEST_REMARK]))

    def notes(self, *, turn: int) -> tuple[TurnInfo, ...]:
        """Return the remarks so far as notes about a turn."""
        with self._lock:
            return tuple(
                TurnInfo(turn=turn, key=key, value=text, kind="text") for key, text in self._remarks
            )

    def metrics(self, *, share: float = 1.0) -> dict[str, float]:
        """Return the sums so far, multiplied by `share`."""
        with self._lock:
            known = self._sums.keys() - self._unknown
            return {name: value * share for name, value in self._sums.items() if name in known}


_current: ContextVar[Usage | None] = ContextVar("telescope_usage", default=None)
_refused: ContextVar[list[str] | None] = ContextVar("telescope_refused", default=None)
"""Roles of the models that were refused; None = models may be called."""


@contextmanager
def counting() -> Generator[Usage, None, None]:
    """Collect the values counted inside the block, in this task and in those it starts."""
    usage = Usage()
    token = _current.set(usage)
    try:
        yield usage
    finally:
        _current.reset(token)


def count(name: str, value: float) -> None:
    """Add `value` to metric `name` of the current rollout or group; outside of one, do nothing."""
    usage = _current.get()
    if usage is not None:
        usage.add(name, value)


def count_unknown(*names: str) -> None:
    """Leave metrics `names` out of the current rollout or group: a part of them is not known."""
    usage = _current.get()
    if usage is not None:
        usage.forget(names)


def remark(key: str, text: str) -> None:
    """Keep `text` with the current rollout or group; outside of one, do nothing."""
    usage = _current.get()
    if usage is not None:
        usage.add_remark(key, text)


@contextmanager
def asking_nobody() -> Generator[list[str], None, None]:
    """Forbid calls of helper models inside the block; yields the roles of those that were refused.

    The list says it even where the code that wanted to ask catches the error.
    """
    refused: list[str] = []
    token = _refused.set(refused)
    try:
        yield refused
    finally:
        _refused.reset(token)


def may_ask() -> bool:
    """Return whether helper models may be called."""
    return _refused.get() is None


def refused_roles() -> Sequence[str]:
    """Return the roles of the models that were refused, in order."""
    return tuple(_refused.get() or ())


def require_may_ask(role: str) -> None:
    """Raise NotAskedError if the model called `role` may not be called."""
    refused = _refused.get()
    if refused is not None:
        refused.append(role)
        raise NotAskedError(f"the {role} was not asked, because that can cost money")
