"""Asking an environment what it declares, straight from its wheel, in a process of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.subprocesses import last_line, run_program

_TIME_LIMIT_S = 120.0
_PROGRAM = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "from telescope_envs.installing.declare import declared; "
    "print(json.dumps(declared(sys.argv[2])))"
)
_PASSED_ON = {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "SYSTEMROOT", "TEMP"}
"""The variables the process sees: no tokens, no keys."""


def describe_wheel(wheel: Path, factory: str) -> dict[str, Any]:
    """Return what `factory` in `wheel` declares; raises EnvironmentLoadError when it cannot load.

    The wheel's code runs, in a subprocess: inspect the wheel first.
    """
    environ = {name: value for name, value in os.environ.items() if name in _PASSED_ON}
    command = [sys.executable, "-P", "-c", _PROGRAM, str(wheel), factory]
    late = f"{wheel.name}: not loaded after {_TIME_LIMIT_S:g} s; its import must be quick"
    finished = run_program(command, environ=environ, limit_s=_TIME_LIMIT_S, late=late)
    if finished.returncode:
        raise EnvironmentLoadError(f"{wheel.name} cannot be loaded: {last_line(finished)}")
    return json.loads(finished.stdout.splitlines()[-1])
