"""Run programs for an environment, within limits and without leftovers.

A program gets no variables and no descriptors but those that are named, and an empty folder to work
in, so that no file around it steers it. A supervisor stands over it: when the program has ended,
its time is over, or this process is gone, everything that it started is killed, daemons with
sessions of their own included.
"""

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.interrupts import raise_in_thread_if_asked
from telescope_envs.records.model import read_json

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")
MAX_OUTPUT_BYTES = 4 * 2**20
"""Bytes that are kept of each of its outputs, from the end."""
_CHUNK_BYTES = 2**16
_LOOK_EVERY_S = 0.05
"""Seconds between two checks whether a silent program has ended."""
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
SUPERVISOR_S = 10.0
"""Seconds for a supervisor to end everything that its program started."""
_LOOK_AGAIN_S = 0.01


def passed_on() -> dict[str, str]:
    """Return the variables of this process that an environment's code may see.

    Tokens, keys, the search path and the home are not among them: `run_program` gives it an empty
    home.
    """
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


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


@dataclass(slots=True, eq=False, kw_only=True)
class Kept:
    """A program under its supervisor, which is `process` and ends in the same way."""

    process: "subprocess.Popen[bytes]"
    until_s: float
    """Its deadline on the monotonic clock."""
    guard_fd: int
    """Our end of a pipe that the supervisor watches: when it closes, everything is ended."""
    has_ended: bool = False
    is_late: bool = False
    """Whether it was ended because its time was over."""
    spent_s: float = 0.0
    """Processor time of all its processes, in seconds; known if it was ended here."""
    _tails: "dict[IO[bytes], _Tail]" = field(init=False)
    _open: "list[IO[bytes]]" = field(init=False)

    def __post_init__(self) -> None:
        """Read both outputs without blocking."""
        assert self.process.stdout is not None, "it is a pipe"
        assert self.process.stderr is not None, "it is a pipe"
        self._tails = {self.process.stdout: _Tail(), self.process.stderr: _Tail()}
        self._open = list(self._tails)
        for stream in self._tails:
            os.set_blocking(stream.fileno(), False)

    @property
    def streams(self) -> "list[IO[bytes]]":
        """The outputs that are still open."""
        return [] if self.has_ended else self._open

    @property
    def out(self) -> str:
        """The end of its output."""
        return self._texts()[0]

    @property
    def err(self) -> str:
        """The end of its error output."""
        return self._texts()[1]

    def look(self) -> None:
        """Read its output, and check whether it has ended; ends it if its time is over."""
        # Asked before the outputs are read, so what it wrote before its end is not lost. Others may
        # hold its outputs open after it, so their end is not waited for.
        ended = self.process.poll() is not None
        if not ended and time.monotonic() > self.until_s:
            self.is_late = ended = True
            self.end()
        self._open = [one for one in self._open if not _is_at_end(one, self._tails[one])]
        self.has_ended = ended

    def end(self) -> None:
        """End it and all that it started, if it has not ended."""
        if self.guard_fd >= 0:
            os.close(self.guard_fd)
            self.guard_fd = -1
        give_up_s = time.monotonic() + SUPERVISOR_S
        while self.process.returncode is None:
            is_stuck = time.monotonic() > give_up_s
            if is_stuck:  # one that cannot end what it keeps is killed, and its program with it
                end_group(self.process)
            pid, status, spent = os.wait4(self.process.pid, 0 if is_stuck else os.WNOHANG)
            if pid:
                self.process.returncode = os.waitstatus_to_exitcode(status)
                self.spent_s = spent.ru_utime + spent.ru_stime
            else:
                time.sleep(_LOOK_AGAIN_S)

    def _texts(self) -> list[str]:
        return [tail.text() for tail in self._tails.values()]


@contextmanager
def kept(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    limit_s: float,
    heirs: Sequence[int] = (),
) -> Generator[Kept]:
    """Start `command` in `folder` with no variables but `environ`; on exit, nothing is left of it.

    It inherits the descriptors `heirs` and no others.
    """
    if shutil.which(command[0], path=environ.get("PATH", os.defpath)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    watched_fd, guard_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _SUPERVISOR, str(watched_fd), *command],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(watched_fd, *heirs),
            start_new_session=True,
        )
    except BaseException:
        os.close(guard_fd)
        raise
    finally:
        os.close(watched_fd)
    program = Kept(process=process, until_s=time.monotonic() + limit_s, guard_fd=guard_fd)
    try:
        yield program
    finally:
        program.end()
        for stream in (process.stdout, process.stderr):
            assert stream is not None, "both are pipes"
            stream.close()


def wait_for(programs: Sequence[Kept]) -> None:
    """Return when all have ended, each at its own limit at the latest; raises at a signal."""
    while running := [one for one in programs if not one.has_ended]:
        raise_in_thread_if_asked()
        streams = [stream for one in running for stream in one.streams]
        if streams:
            select.select(streams, [], [], _LOOK_EVERY_S)
        else:
            # They have closed their outputs. Most often they end now, but they may go on.
            with suppress(subprocess.TimeoutExpired):
                running[0].process.wait(_LOOK_EVERY_S)
        for one in running:
            one.look()


def run_program(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    limit_s: float,
    late: str,
    heirs: Sequence[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `command` with no variables but `environ`, for at most `limit_s` seconds.

    Raises EnvironmentLoadError(late) after that time. It works in an empty folder, which is its
    home and its temporary folder too unless `environ` names others. It inherits the descriptors
    `heirs`, so locks among them stay held until it has ended as well: give them to programs that
    are trusted, never to an environment's code.
    """
    with tempfile.TemporaryDirectory(prefix="telescope-run-") as empty:
        environ = {"HOME": empty, "TMPDIR": empty, **environ}
        place = Path(empty)
        with kept(command, environ=environ, folder=place, limit_s=limit_s, heirs=heirs) as program:
            wait_for([program])
            if program.is_late:
                raise EnvironmentLoadError(late)
        code = program.process.returncode
    return subprocess.CompletedProcess(list(command), code, program.out, program.err)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill everything in the session that `process` was started in, whether it has ended or not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_at_end(stream: IO[bytes], tail: _Tail) -> bool:
    """Read available data; returns whether the end is reached."""
    with suppress(BlockingIOError):
        while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
            tail.add(chunk)
        return True
    return False


def printed_table(
    finished: subprocess.CompletedProcess[str], *, what: str, keys: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the JSON table in the last line of a program's output, which has all of `keys`.

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
