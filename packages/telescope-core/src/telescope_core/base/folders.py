"""Make folders, with an error that says what to do where none can be made."""

import os
from pathlib import Path

from telescope_core.base.errors import ConfigError


def why_not_writable(folder: Path) -> str | None:
    """Return why nothing can be written in `folder`, which may not be there yet; None if it can.

    Nothing is created. A file system that is mounted to be read only is known too.
    """
    existing = folder
    # Not a method of the path, which fails in a folder that may not be searched.
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not os.path.isdir(existing):
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


def make_folder(path: Path) -> None:
    """Make the folder `path` and those above, unless it is there.

    Raises ConfigError where no folder can be made, such as in /proc, of which the system only says
    that there is no such file.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the folder {path} cannot be made: {Path(error.filename).parent} takes no new "
            "folders; name another place"
        ) from error
