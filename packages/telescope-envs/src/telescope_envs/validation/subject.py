"""`Subject`: what is validated - a project folder, a wheel, or something installed."""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the levels look at. Fields are empty where they do not apply."""

    label: str
    """What a person calls it."""
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
    """Folders that the interpreter looks into first."""
