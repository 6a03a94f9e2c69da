"""Counting what a rollout uses besides its policy: calls, tokens and cost of judges and users.

Whoever spends calls `count`; the rollout or group that is being played or scored in this task
gets it as metrics. Threads started for the task count as well.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar


class Usage:
    """Sums by metric name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Add `value` to the sum of `name`."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self, *, share: float = 1.0) -> dict[str, float]:
        """Return the sums so far, times `share`."""
        with self._lock:
            return {name: value * share for name, value in self._sums.items()}


_current: ContextVar[Usage | None] = ContextVar("telescope_usage", default=None)


@contextmanager
def counting() -> Generator[Usage, None, None]:
    """Collect what is counted inside, in this task and in what it starts."""
    usage = Usage()
    token = _current.set(usage)
    try:
        yield usage
    finally:
        _current.reset(token)


def count(name: str, value: float) -> None:
    """Add `value` to metric `name` of the rollout or group at hand; nothing happens outside one."""
    usage = _current.get()
    if usage is not None:
        usage.add(name, value)
