"""The standard streams: always there, escaped where texts of others are printed, JSON alone.

The verbs about environments print names, summaries and messages from other people. They are escaped
where the text leaves the program, so that no verb can forget it.
"""

import io
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from telescope_core.base.terminal import escaped


def make_streams_usable() -> None:
    """Open the standard streams that are closed, and let the output be written in any encoding.

    Call it before other files are opened: the number of a closed stream would go to one of them,
    and a program that is started gets its own stream there. A character that the encoding of the
    output lacks becomes a question mark: a run that has finished must not fail by its last words.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _Escaping:
    """A text stream that escapes everything before it is written to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the escaped text."""
        self._stream.write(escaped(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the escaped lines."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Return False: styles and cursor movements would be escaped like all others."""
        return False

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            # Libraries that find it would write to it, past this class.
            raise AttributeError("escaped output is text only")
        return getattr(self._stream, name)


@contextmanager
def escaped_output() -> Generator[None]:
    """Escape everything that is written to standard output and error."""
    out, err = cast(TextIO, _Escaping(sys.stdout)), cast(TextIO, _Escaping(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def prints_kept_off(stdout_is_json: bool) -> Generator[None]:
    """Send what the block prints to standard error, if standard output is for JSON alone.

    The block runs code of environments in this process, which may print.
    """
    with redirect_stdout(sys.stderr) if stdout_is_json else nullcontext():
        yield
