"""Running a program to its end within a time limit, with its output as text."""

import subprocess
from collections.abc import Mapping, Sequence

from telescope_core.errors import EnvironmentLoadError


def run_program(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    limit_s: float,
    late: str,
    heirs: Sequence[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `command` with no variables but `environ`, for at most `limit_s` seconds.

    Raises EnvironmentLoadError(late) after that time. The program inherits the descriptors `heirs`,
    so locks among them stay held until it has ended as well.
    """
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            pass_fds=tuple(heirs),
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLoadError(late) from error


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    """Return the last line a program wrote to stderr, which for Python is the exception."""
    return (finished.stderr.strip().splitlines() or ["no message"])[-1]
