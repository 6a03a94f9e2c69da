"""Report trouble with endpoints: what a server answered in place of a reply, and how often.

`HttpPool` reports every attempt that fails and will be repeated, so that users see the reason of a
wait: `showing_troubles` gets a line while the trouble lasts, and `watching` keeps the last one.
"""

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_log = logging.getLogger(__name__)
SHOWN_EVERY_S = 10.0
"""Minimum seconds between two lines about the same URL."""
FORGOTTEN_AFTER_S = 60.0
"""Seconds without a failure after which the failure count starts again."""


class Watch:
    """Present trouble of the requests made by one task and the tasks that it started."""

    def __init__(self, outer: "Watch | None") -> None:
        self._outer = outer
        self._lines: dict[str, str] = {}
        self.num_retries = 0
        """Times that the requests were sent again."""

    @property
    def text(self) -> str:
        """The last trouble at each URL that has not answered since; empty if there is none."""
        return "; ".join(self._lines.values())

    def note(self, url: str, line: str | None) -> None:
        """Record `line` as the trouble at `url`; None = the trouble is over."""
        if line is None:
            self._lines.pop(url, None)
        else:
            self._lines[url] = line
        if self._outer is not None:
            self._outer.note(url, line)

    def sent_again(self) -> None:
        """Count a request that is sent again."""
        self.num_retries += 1
        if self._outer is not None:
            self._outer.sent_again()


_current: ContextVar[Watch | None] = ContextVar("telescope_trouble", default=None)


@contextmanager
def watching() -> Generator[Watch, None, None]:
    """Watch the requests made in the block, by this task and the tasks that it starts."""
    watch = Watch(_current.get())
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)


@contextmanager
def showing_troubles(show: Callable[[str], None]) -> Generator[None, None, None]:
    """Call `show` with each line about an endpoint in trouble, from any thread."""
    handler = _Shown(show)
    was_propagating = _log.propagate
    # Otherwise a line would also be written to stderr, in the middle of what `show` draws there.
    _log.propagate = False
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.propagate = was_propagating


def relay(line: str) -> None:
    """Show a `line` about trouble that another process has counted."""
    _log.warning("%s", line)


class _Shown(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


@dataclass(slots=True)
class _Trouble:
    count: int = 0
    failed_s: float = float("-inf")
    shown_s: float = float("-inf")


class Troubles:
    """Counts the failed attempts of one pool, by URL; `now` gives seconds on a steady clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._by_url: dict[str, _Trouble] = {}

    def failed(self, url: str, cause: str, *, wait_s: float) -> None:
        """Report an attempt that failed with `cause` and is repeated after `wait_s` seconds."""
        now_s = self._now()
        trouble = self._by_url.setdefault(url, _Trouble())
        if now_s - trouble.failed_s > FORGOTTEN_AFTER_S:
            trouble.count = 0
        trouble.count += 1
        trouble.failed_s = now_s
        times = "once" if trouble.count == 1 else f"{trouble.count} times"
        watch = _current.get()
        if watch is not None:
            watch.note(url, f"{cause} ({times})")
        if now_s - trouble.shown_s >= SHOWN_EVERY_S:
            trouble.shown_s = now_s
            _log.warning("%s (%s; trying again in %.1f s)", cause, times, wait_s)

    def sent_again(self) -> None:
        """Report that a request is sent again, whatever becomes of it."""
        watch = _current.get()
        if watch is not None:
            watch.sent_again()

    def over(self, url: str) -> None:
        """Report an attempt that succeeded."""
        watch = _current.get()
        if watch is not None:
            watch.note(url, None)
