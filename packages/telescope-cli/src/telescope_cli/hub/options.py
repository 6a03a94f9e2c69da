"""What several verbs of `telescope hub` share."""

from pathlib import Path
from typing import Annotated

import typer

from telescope_core.errors import ConfigError

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="folder of the registry")]


def registry_folder(folder: Path) -> Path:
    """Return `folder`; raises ConfigError when no registry is in it."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is no registry: it has no config.json; give the folder that holds "
            "config.json and index/"
        )
    return folder


DataOption = Annotated[
    Path, typer.Option("--data", metavar="DIR", help="Folder of what telescope hub serve serves.")
]
