"""Logs of bounded size for the output of processes, read from a pipe by their parent.

    the process  -- stdout, stderr -->  pipe  -->  a thread of who started it  -->  log and tail

A file that ends in `.jsonl` gets lines as in all other logs (see `logs`), with the time at which
each was printed; another one gets the text as it is. A process never waits for a disk that is full:
lines that the file does not take are lost.
"""

import logging
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock, Thread

from telescope_core.base.secret_names import hidden
from telescope_core.records.logs import MAX_BYTES, SHOWN_AS, JsonLines, level_of

INFERENCE = "inference"
"""Component of the output of inference servers."""
ENVIRONMENT_OUTPUT = "environment_output"
"""Component of the output of environment workers."""
_READ_BYTES = 2**16
_TAIL_LINES = 50
_POLL_S = 0.25
"""Seconds after which an incomplete line is written, such as a question."""
_LAST_WORDS_S = 1.0
"""Longest time in seconds to read on at the end, if output does not stop."""
_FAULT = re.compile(
    r"\*\*\* SIG\w+ received|terminate called|Check failed|\bFATAL\b|Fatal Python error"
    r"|[Ss]egmentation fault|[Oo]ut of memory|cannot allocate memory",
)
"""Texts in a line that mean that a process ends by a fault."""


def first_error(text: str) -> str:
    """Return the line of a process's output with the first cause of its failure; empty if none.

    In a traceback, that is the line with the exception.
    """
    is_traceback = False
    for line in text.splitlines():
        if "Traceback (most recent call last)" in line:
            is_traceback = True
        elif is_traceback:
            if line.strip() and not line.startswith((" ", "\t")):
                return line.strip()
        elif _FAULT.search(line):
            return line.strip()
    return ""


def is_output(name: str) -> bool:
    """Return whether the log called `name` holds the output of a process."""
    return name.endswith(".log") or name.startswith((f"{INFERENCE}-", f"{ENVIRONMENT_OUTPUT}-"))


class OutputLog:
    """Logs the output of one process: pass it `fd`, call `begin` once it runs, `close` at its end.

    Any thread may call any method.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        component: str = "",
        source: str = "",
        hide: Iterable[str] = (),
        max_bytes: int = MAX_BYTES,
        hear: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`path`: the log; None = only its tail is kept. `hide`: values that are removed from it.

        `hear` is given each line, without those values, in a thread.
        """
        self._hear = hear
        self._hide = set(hide)
        self._handler: JsonLines | None = None
        if path is not None:
            kind = JsonLines if path.suffix == ".jsonl" else _PlainLines
            self._handler = kind(
                path, component=component, source=source, hide=self._hide, max_bytes=max_bytes
            )
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._level = "info"
        self._ends_s: float | None = None
        self.num_bytes = 0
        """Number of bytes printed so far."""
        self._read_end, self.fd = os.pipe()
        self._closing = Lock()
        self._thread = Thread(target=self._read, name="output of a process", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether more may be printed, by the process or by one that it has started."""
        return self._thread.is_alive()

    def begin(self) -> None:
        """Start reading; the process must hold the other end by now."""
        self._close_fd()
        self._thread.start()

    def tail(self, num_lines: int) -> str:
        """Return the last lines."""
        return "\n".join(list(self._tail)[-num_lines:])

    def hide(self, values: Iterable[str]) -> None:
        """Remove these texts from lines from now on."""
        self._hide = {*self._hide, *values}
        if self._handler is not None:
            self._handler.hide(self._hide)

    def drain(self, within_s: float) -> None:
        """Wait until all output of a process that has ended is read."""
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def close(self) -> None:
        """Read the rest of the pipe without waiting for more. Idempotent."""
        self._close_fd()
        if self._ends_s is None:
            self._ends_s = time.monotonic() + _LAST_WORDS_S
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_S + 2 * _POLL_S)
        else:
            self._end()

    def _close_fd(self) -> None:
        with self._closing:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _end(self) -> None:
        with self._closing:
            fd, self._read_end = self._read_end, -1
        if fd >= 0:
            os.close(fd)
        if self._handler is not None:
            self._handler.close()

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN | select.POLLHUP)
        begun = b""
        try:
            while True:
                is_quiet = not poll.poll(_POLL_S * 1e3)
                content = b"" if is_quiet else os.read(self._read_end, _READ_BYTES)
                self.num_bytes += len(content)
                *lines, begun = (begun + content).split(b"\n")
                # An unfinished line is written as it is, if nothing follows it or it is very long.
                if begun and (not content or len(begun) > _READ_BYTES):
                    lines, begun = [*lines, begun], b""
                for line in lines:
                    self._write(line)
                is_closed = not content and not is_quiet
                ends_s = self._ends_s
                if is_closed or (ends_s is not None and (is_quiet or time.monotonic() > ends_s)):
                    return
        finally:
            self._end()

    def _write(self, line: bytes) -> None:
        # A progress bar is drawn over itself: what a terminal would show is kept.
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        shown = hidden(text, self._hide)
        self._tail.append(shown)
        self._hear(shown)
        self._level = level_of(text, self._level)
        if self._handler is not None:
            self._handler.handle(logging.makeLogRecord({"msg": text, SHOWN_AS: self._level}))


class _PlainLines(JsonLines):
    """Writes the same as plain text, without time and level."""

    def __init__(
        self, path: Path, *, component: str, source: str, hide: Iterable[str], max_bytes: int
    ) -> None:
        super().__init__(path, component=component, source=source, hide=hide, max_bytes=max_bytes)
        self.namer = None

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return hidden(record.getMessage(), self._hide)
