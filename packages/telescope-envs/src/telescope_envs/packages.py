"""Changing an interpreter's packages with uv: requirements, one verified wheel, removal.

Nothing already installed is ever moved to another version: an environment that needs one is an
error that says so.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from telescope_core.errors import EnvironmentLoadError
from telescope_envs.subprocesses import run_program

_PIP_TO_UV = {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_CERT": "SSL_CERT_FILE",
}
_TIME_LIMIT_S = 900.0


def missing_requirements(requires_dist: Iterable[str]) -> list[str]:
    """Return the requirements that the installed packages do not satisfy, theirs included."""
    missing: list[str] = []
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in requires_dist]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            missing.append(_without_marker(requirement))
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            missing.append(_without_marker(requirement))
            continue
        for wanted_extra in requirement.extras or {""}:
            key = (str(canonicalize_name(requirement.name)), wanted_extra)
            if key not in seen:
                seen.add(key)
                pending += [(Requirement(text), wanted_extra) for text in found.requires or []]
    return sorted(set(missing))


def install_requirements(requirements: Sequence[str], *, needed_by: str) -> None:
    """Install `requirements` from the package index, moving nothing that is installed."""
    pins = [f"{found.name}=={found.version}" for found in distributions() if found.name]
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "installed.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in sorted(set(pins))))
        _uv(
            ["install", "--constraints", str(constraints), *requirements],
            failure=f"{needed_by} needs {', '.join(requirements)}, which cannot be installed "
            "beside what is installed now",
        )


def create_venv(folder: Path) -> None:
    """Make an empty virtual environment of this interpreter's Python that can be renamed."""
    _run(
        ["venv", "--no-project", "--relocatable", "--python", sys.executable, str(folder)],
        failure=f"no virtual environment can be made in {folder}",
    )


def install_into(python: Path, requirements: Sequence[str], wheel: Path, *, needed_by: str) -> None:
    """Install `requirements` and one local wheel for `python`, as hard links where possible.

    Versions are those of this interpreter for what it has. The cache is tried before the index.
    """
    pins = sorted({f"{found.name}=={found.version}" for found in distributions() if found.name})
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "installed.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in pins))
        arguments = [
            *("pip", "install", "--python", str(python), "--link-mode", "hardlink"),
            *("--constraints", str(constraints), *requirements),
        ]
        failure = f"{needed_by} needs {', '.join(requirements)}, which cannot be installed together"
        try:
            _run([*arguments, "--offline"], failure=failure)
        except EnvironmentLoadError:
            _run(arguments, failure=failure)
    _run(
        [
            *("pip", "install", "--python", str(python), "--offline", "--no-index", "--no-deps"),
            str(wheel),
        ],
        failure=f"{wheel.name} cannot be installed",
    )


def install_wheel(wheel: Path) -> None:
    """Install one local wheel, without dependencies and without the network."""
    _uv(
        ["install", "--offline", "--no-index", "--no-deps", "--reinstall", str(wheel)],
        failure=f"{wheel.name} cannot be installed",
    )


def uninstall_distribution(name: str) -> None:
    """Remove one distribution."""
    _uv(["uninstall", name], failure=f"{name} cannot be removed")


def _without_marker(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()


def _uv(arguments: list[str], *, failure: str) -> None:
    verb, *rest = arguments
    _run(["pip", verb, "--python", sys.executable, *rest], failure=failure)


def _run(arguments: list[str], *, failure: str) -> None:
    late = f"{failure}: uv did not finish in {_TIME_LIMIT_S:g} s; check the network"
    command = [uv.find_uv_bin(), *arguments]
    finished = run_program(command, environ=_uv_environment(), limit_s=_TIME_LIMIT_S, late=late)
    if finished.returncode:
        raise EnvironmentLoadError(f"{failure}. uv said:\n{finished.stderr.strip()}")


def _uv_environment() -> dict[str, str]:
    """Return this process's variables, with pip's index settings passed on under uv's names."""
    environ = dict(os.environ)
    for pip_name, uv_name in _PIP_TO_UV.items():
        if environ.get(pip_name) and not environ.get(uv_name):
            environ[uv_name] = environ[pip_name]
    return environ
