"""Running a program on an environment's behalf: within limits, and with nothing left of it.

The program gets no variables and no descriptors but those that are named, and an empty folder to
work in, so that no file around it steers it. When it has ended, or its time is over, everything
that it started in its process group is killed.
"""

import os
import select
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.documents import read_json

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")
MAX_OUTPUT_BYTES = 4 * 2**20
"""Of each of its outputs, the last this many bytes are kept."""
_CHUNK_BYTES = 2**16
_LOOK_EVERY_S = 0.05
"""Seconds between two looks at whether a program that says nothing has ended."""


def passed_on() -> dict[str, str]:
    """Return the variables of this process that an environment's code may see.

    Tokens, keys, the search path and the home are not among them: `run_program` gives it an empty
    home.
    """
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def run_program(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    limit_s: float,
    late: str,
    heirs: Sequence[int] = (),
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `command` with no variables but `environ`, for at most `limit_s` seconds.

    Raises EnvironmentLoadError(late) after that time. It works in `folder`, by default in an empty
    one, which is its home and its temporary folder too unless `environ` names others. It inherits
    the descriptors `heirs`, so locks among them stay held until it has ended as well: give them to
    programs that are trusted, never to an environment's code.
    """
    with _folder(folder) as place:
        process = subprocess.Popen(
            command,
            env={"HOME": str(place), "TMPDIR": str(place), **environ},
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(heirs),
            start_new_session=True,
        )
        try:
            out, err = _outputs(process, until_s=time.monotonic() + limit_s, late=late)
        finally:
            # Its own process is ended and all that it started. Nobody waits for those: they are
            # not children of this process.
            end_group(process)
            process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None, "both are pipes"
                stream.close()
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill everything in the session that `process` was started in, whether it has ended or not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _folder(given: Path | None) -> Generator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="telescope-run-") as empty:
        yield Path(empty)


class _Tail:
    """The end of an output of any length."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= MAX_OUTPUT_BYTES:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        return b"".join(self._chunks)[-MAX_OUTPUT_BYTES:].decode(errors="replace")


def _outputs(process: subprocess.Popen[bytes], *, until_s: float, late: str) -> tuple[str, str]:
    """Return what the process writes until it ends."""
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    tails = {process.stdout: _Tail(), process.stderr: _Tail()}
    still_open = list(tails)
    for stream in tails:
        os.set_blocking(stream.fileno(), False)
    while True:
        # Asked before the streams are read, so what it wrote before its end is not lost. Others may
        # hold its streams open after it, so their end is not waited for.
        has_ended = process.poll() is not None
        ready, _, _ = select.select(still_open, [], [], 0 if has_ended else _LOOK_EVERY_S)
        still_open = [s for s in still_open if s not in ready or not _is_at_end(s, tails[s])]
        if has_ended:
            break
        if time.monotonic() > until_s:
            raise EnvironmentLoadError(late)
        if not still_open:
            # It has closed both. Most often it ends now, but it may go on.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_S)
    out, err = (tail.text() for tail in tails.values())
    return out, err


def _is_at_end(stream: IO[bytes], tail: _Tail) -> bool:
    """Take what is there now; returns whether nothing more can come."""
    with suppress(BlockingIOError):
        while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
            tail.add(chunk)
        return True
    return False


def printed_table(
    finished: subprocess.CompletedProcess[str], *, what: str, keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the JSON table in the last line that a program printed, which has all of `keys`.

    Raises EnvironmentLoadError for anything else: an environment's code may print too, or end its
    process before the table is printed.
    """
    try:
        found = read_json((finished.stdout.splitlines() or [""])[-1])
    except ValueError:
        found = None
    if not isinstance(found, dict) or not set(keys) <= set(cast(dict[str, object], found)):
        raise EnvironmentLoadError(
            f"{what} ended its process while it was loaded; expected its declarations, got "
            f"{finished.stdout[-200:]!r}"
        )
    return cast(dict[str, Any], found)


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    """Return the last line a program wrote to stderr, which for Python is the exception."""
    return (finished.stderr.strip().splitlines() or ["no message"])[-1]
