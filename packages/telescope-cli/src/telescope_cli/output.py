"""Standard output and error: what a terminal would act on is escaped, and JSON stands alone.

The verbs about environments print names, summaries and messages from other people. They are escaped
where the text leaves the program, so that no verb can forget it.
"""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from telescope_core.base.terminal import escaped


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
