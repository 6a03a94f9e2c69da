"""Folders with the packages of agent programs: one virtual environment per set of requirements.

`telescope agent install NAME` makes them. Sandboxes of this machine run as an ordinary user, so
they have to be where every user can read them.
"""

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.harnesses.protocol import Harness

VARIABLE = "TELESCOPE_AGENTS"
COMPLETE = "complete"
"""File that marks a complete installation."""
_FOLDER_OF_ROOT = Path("/var/lib/telescope/agents")
_DIGITS = 12


def agents_folder() -> Path:
    """Return `$TELESCOPE_AGENTS`, or else a folder of the user; for root, one outside its home."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if os.getuid() == 0:
        return _FOLDER_OF_ROOT
    return Path("~/.local/share/telescope/agents").expanduser()


def agent_folder(
    name: str, requirements: Sequence[str], interpreter: str, excluded: Sequence[str] = ()
) -> Path:
    """Return the folder, which may not exist yet, of a harness's packages for one interpreter."""
    made_of = "\n".join((interpreter, *requirements, *(f"not {one}" for one in excluded)))
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:_DIGITS]
    return agents_folder() / f"{name}-{digest}"


def require_installed(harness: Harness, interpreter: str) -> Path:
    """Return the folder of the packages; raises EnvironmentLoadError with the command to run."""
    excluded: tuple[str, ...] = getattr(harness, "excluded", ())
    folder = agent_folder(harness.name, harness.requirements, interpreter, excluded)
    if not (folder / COMPLETE).exists():
        raise EnvironmentLoadError(
            f"harness {harness.name!r} needs {', '.join(harness.requirements)}, which is not in "
            f"{agents_folder()}; run: telescope agent install {harness.name}"
        )
    require_readable(folder)
    return folder


def require_readable(folder: Path) -> None:
    """Raise EnvironmentLoadError if sandboxes, which root runs as another user, cannot read it."""
    if os.getuid() != 0:
        return
    known = next(one for one in (folder, *folder.parents) if one.exists())
    for one in (known, *known.parents):
        if not one.stat().st_mode & stat.S_IXOTH:
            raise EnvironmentLoadError(
                f"sandboxes cannot read {folder}, because {one} is closed to other users; set "
                f"{VARIABLE} to a folder that every user can read"
            )
