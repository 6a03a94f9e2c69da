"""Make folders, with an error that says what to do where none can be made."""

from pathlib import Path

from telescope_core.base.errors import ConfigError


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
