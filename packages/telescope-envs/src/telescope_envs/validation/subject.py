"""`Subject`: what is validated, which is a project folder, a wheel or something installed."""

import sys
from dataclasses import dataclass
from pathlib import Path


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
