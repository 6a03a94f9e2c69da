"""Find harnesses by name, among those that installed packages declare, and their own packages.

Those are in one virtual environment per set of requirements, which `telescope agent install NAME`
makes. Sandboxes of this machine run as an ordinary user, so
they have to be where every user can read them.
"""

import hashlib
import inspect
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, EnvironmentLoadError, unknown_name
from telescope_core.harnesses.protocol import Harness

GROUP = "telescope.harnesses"


def harness_names() -> list[str]:
    """Return the names of all harnesses."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def open_harness(name: str, **options: object) -> Harness:
    """Return the harness called `name`, made with `options`.

    Raises UnknownNameError for an unknown one, and ConfigError for options that it does not take.
    """
    factory = _factory(name)
    known = inspect.signature(factory).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for option in options:
        if option not in known and not takes_any:
            raise unknown_name(f"option of harness {name!r}", option, known)
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"harness {name!r}: {error}") from None


def harness_requirements(name: str) -> tuple[str, ...]:
    """Return the packages of the harness called `name`, which its class declares."""
    return _factory(name).requirements


def harness_excluded(name: str) -> tuple[str, ...]:
    """Return packages that the harness called `name` does not need, although others require them.

    Most harnesses declare none.
    """
    return getattr(_factory(name), "excluded", ())


def _factory(name: str) -> Any:
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise unknown_name("harness", name, points)
    return points[name].load()


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
