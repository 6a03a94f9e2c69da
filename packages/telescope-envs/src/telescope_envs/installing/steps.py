"""What an installation is made of, and what it may be told. Every step announces itself first."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

Progress = Callable[[str], None]


class Step(StrEnum):
    """One step, in order, as it is announced."""

    RESOLVE = "looking it up"
    """Nothing is known yet."""
    DOWNLOAD = "fetching the wheel"
    """The release is known to run here."""
    INSPECT = "inspecting the wheel"
    """Its bytes are those that were published."""
    LOCK = "locking dependencies"
    """The wheel holds nothing that it must not, and is in the cache."""
    BUILD = "building a virtual environment"
    """Every version and hash is known."""
    DEPENDENCIES = "installing dependencies"
    """The virtual environment is there, aside."""
    WHEEL = "installing the wheel"
    """What it needs is in it."""
    PROBE = "trying it"
    """It is in it."""
    ACTIVATE = "activating"
    """It works; the virtual environment is at its place."""
    WRITE_LOCK = "writing telescope.lock"
    """It can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallOptions:
    """How to install."""

    shared: bool = False
    """Into this interpreter, in place of a virtual environment of its own."""
    offline: bool = False
    """Without any network: from caches."""
    allow_sdist: tuple[str, ...] = ()
    """Dependencies that may be built from source, which runs their code while installing."""
    lock: Path | None = None
    """The telescope.lock to read and write; None = none."""
    wheels: Path | None = None
    """A folder of wheels to take dependencies from, in place of the package index."""


def silent(step: str) -> None:
    """Tell nobody."""
