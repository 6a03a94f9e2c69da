"""The steps of an installation, each announced before it starts, and its options."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

Progress = Callable[[str], None]


class Step(StrEnum):
    """Steps in order, as they are announced; each says what holds at its beginning."""

    RESOLVE = "looking it up"
    """Nothing is known yet."""
    DOWNLOAD = "fetching the wheel"
    """The release is known to run here."""
    INSPECT = "inspecting the wheel"
    """Its bytes are here, and nothing is known of them."""
    LOCK = "locking dependencies"
    """The wheel holds nothing forbidden, and is in the cache."""
    BUILD = "building a virtual environment"
    """Every version and hash is known."""
    DEPENDENCIES = "installing dependencies"
    """The virtual environment exists in a scratch folder."""
    WHEEL = "installing the wheel"
    """The dependencies are installed in the virtual environment."""
    PROBE = "trying it"
    """The wheel is installed in the virtual environment."""
    ACTIVATE = "activating"
    """The environment loads, and its virtual environment is in its final place."""
    WRITE_LOCK = "writing telescope.lock"
    """The environment can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallOptions:
    """The options of an installation."""

    shared: bool = False
    """Install into this interpreter instead of a virtual environment of its own."""
    offline: bool = False
    """Use only caches, without any network."""
    allow_sdist: tuple[str, ...] = ()
    """Dependencies that may be built from source, which runs their code while installing."""
    lock: Path | None = None
    """The telescope.lock to read and write; None to use no lock."""
    wheels: Path | None = None
    """A folder of wheels to take dependencies from, instead of the package index."""
    reinstall: bool = False
    """Build again what is installed, from packages that are fetched and checked anew."""


def silent(step: str) -> None:
    """Ignore the progress."""
