"""Count what a rollout uses besides its policy: calls, tokens and cost of judges and users.

Code that uses a helper model calls `count`. The values become metrics of the rollout or group that
the current task plays or scores, including its threads.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar


class Usage:
    """Sums of counted values, by metric name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Add `value` to the sum of `name`."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self, *, share: float = 1.0) -> dict[str, float]:
        """Return the sums so far, multiplied by `share`."""
        with self._lock:
            return {name: value * share for name, value in self._sums.items()}


_current: ContextVar[Usage | None] = ContextVar("telescope_usage", default=None)


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
