"""Running a program to its end, within a time, with what it says as text."""

import subprocess
from collections.abc import Mapping, Sequence

from telescope_core.errors import EnvironmentLoadError


def run_program(
    command: Sequence[str], *, environ: Mapping[str, str], limit_s: float, late: str
) -> subprocess.CompletedProcess[str]:
    """Run `command` with no variables but `environ`; raises EnvironmentLoadError(late) in time."""
    try:
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentLoadError(late) from error


def last_line(finished: subprocess.CompletedProcess[str]) -> str:
    """Return the last line a program wrote about its failure: Python's own is the exception."""
    return (finished.stderr.strip().splitlines() or ["no message"])[-1]
