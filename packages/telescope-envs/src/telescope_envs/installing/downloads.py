"""Fetching the wheels of locked packages for this platform with pip, each by its hash."""

import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.packages import Uv, wheels_only
from telescope_envs.subprocesses import last_line, run_program

_TIME_LIMIT_S = 1800.0
_UV_TO_PIP = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
    "SSL_CERT_FILE": "PIP_CERT",
}


def download_wheels(lines: Sequence[str], folder: Path, *, needed_by: str) -> None:
    """Download the wheels that requirement `lines` name into `folder` with pip, as uv cannot.

    Raises EnvironmentLoadError if a package is missing, has another hash, or has no wheel.
    """
    if not lines:
        return
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text("".join(f"{line}\n" for line in lines))
        environ = _pip_environment(Path(scratch))
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", *wheels_only(())),
            *("--requirement", str(listed), "--dest", str(folder.absolute())),
        ]
        late = f"the packages of {needed_by} were not fetched within {_TIME_LIMIT_S:g} s"
        done = run_program(command, environ=environ, limit_s=_TIME_LIMIT_S, late=late)
    if done.returncode:
        raise EnvironmentLoadError(
            f"the packages of {needed_by} cannot be fetched as wheels for this platform: "
            f"{last_line(done)}; a bundle cannot hold packages that must be built from source"
        )


def _pip_environment(scratch: Path) -> dict[str, str]:
    """Return this process's variables plus uv's settings by pip's names; installs pip if needed."""
    environ = dict(os.environ)
    for uv_name, pip_name in _UV_TO_PIP.items():
        if environ.get(uv_name) and not environ.get(pip_name):
            environ[pip_name] = environ[uv_name].replace(",", " ")
    # On the search path alone: the finder that setuptools adds changes modules when asked for pip.
    if PathFinder.find_spec("pip") is None:
        Uv().run(
            ["pip", "install", "--quiet", "--target", str(scratch / "pip"), "pip"],
            failure="pip, which fetches the packages of a bundle, cannot be installed",
        )
        environ["PYTHONPATH"] = str(scratch / "pip")
    return environ
