"""`telescope env link`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_envs.linking import link as link_folder


def link(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the project.")],
    as_json: JsonOption = False,
) -> None:
    """Use an environment from its project folder, for development.

    Its code runs in the process that uses it, and each run uses the current files. `telescope env
    uninstall` removes the link.

    Example: telescope env link ./my-env
    """
    project = link_folder(folder)
    if as_json:
        about = {"id": project.id, "version": project.version, "folder": str(project.folder)}
        typer.echo(json.dumps(about))
        return
    typer.echo(f"{project.id} {project.version}: linked to {project.folder}")
