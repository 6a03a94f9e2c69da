"""Arguments and options shared by several verbs of `telescope hub`."""

from pathlib import Path
from typing import Annotated

import typer

from telescope_core.base.errors import ConfigError

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the registry.")]


def registry_folder(folder: Path) -> Path:
    """Return `folder`; raises ConfigError when it is not a registry."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a registry: it has no config.json; give the folder that "
            "contains config.json and index/"
        )
    return folder


DataOption = Annotated[
    Path, typer.Option("--data", metavar="DIR", help="Data folder of telescope hub serve.")
]
