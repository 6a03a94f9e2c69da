"""What is validated, and making it importable, by this Python or in a virtual environment."""

import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path

from packaging.metadata import parse_email

from telescope_core.errors import TelescopeError
from telescope_envs.install.data import python_of
from telescope_envs.install.packages import missing_requirements
from telescope_envs.install.requirements import CORE, direct_needs
from telescope_envs.install.venv import link_byte_code, link_distribution
from telescope_envs.processes.uv import Uv, installed_pins, wheels_only
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.processes import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the levels check. Fields are empty if they do not apply."""

    label: str
    """Its name in messages and reports."""
    project: Path | None = None
    """Folder with pyproject.toml."""
    wheel_name: str = ""
    wheel: bytes = b""
    metadata: bytes = b""
    """The METADATA file."""
    factory: str = ""
    """`module:Class`."""
    interpreter: str = sys.executable
    """The Python that imports it."""
    search_path: tuple[str, ...] = ()
    """Folders that go to the front of the interpreter's import path."""


_CHECK = "load.requirements"


def scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a temporary folder for one validation, which is deleted after it."""
    return tempfile.TemporaryDirectory(prefix="telescope-validate-", ignore_cleanup_errors=True)


def prepare_place(
    subject: Subject, scratch: Path, findings: Findings, *, allow_sdist: Sequence[str] = ()
) -> Place | None:
    """Make `subject` importable; None if its dependencies cannot be installed.

    A wheel is unpacked, not installed. This interpreter imports it if it has all its dependencies.
    Otherwise a virtual environment in `scratch` gets them, and its interpreter imports the wheel.
    """
    findings.passed(_CHECK)
    if not subject.wheel:
        return Place(interpreter=subject.interpreter, search_path=(), scratch=scratch)
    unpacked = scratch / "unpacked"
    with zipfile.ZipFile(BytesIO(subject.wheel)) as archive:
        archive.extractall(unpacked)
    needs = parse_email(subject.metadata)[0].get("requires_dist", [])
    interpreter = sys.executable
    if missing_requirements(needs):
        try:
            arguments = [*wheels_only(allow_sdist), *direct_needs(needs)]
            interpreter = str(_venv_with(arguments, scratch / "venv", needed_by=subject.label))
        except TelescopeError as error:
            findings.found(_CHECK, str(error))
            return None
    return Place(interpreter=interpreter, search_path=(str(unpacked),), scratch=scratch)


def _venv_with(needs: Sequence[str], folder: Path, *, needed_by: str) -> Path:
    """Create a virtual environment with `needs`, as arguments of uv; returns its interpreter."""
    uv = Uv()
    uv.run(
        ["venv", "--no-project", "--python", sys.executable, str(folder)],
        failure=f"a virtual environment cannot be created in {folder}",
    )
    python = python_of(folder)
    constraints = folder / "installed.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in installed_pins()))
    arguments = [
        *("pip", "install", "--python", str(python), "--quiet", "--link-mode", "hardlink"),
        *("--constraints", str(constraints), *needs),
    ]
    uv.run_cache_first(arguments, failure=f"the dependencies of {needed_by} cannot be installed")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    link_distribution(distribution(CORE), packages)
    link_byte_code(packages)
    return python
