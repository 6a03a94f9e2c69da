"""`telescope hub render`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption, progress
from telescope_cli.hub.options import FolderArgument, registry_folder
from telescope_envs.registry.static_view import render


def render_registry(
    folder: FolderArgument,
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder, or one that was rendered before.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Write a registry as files for any static host, with pages for pip and uv.

    OUT gets the registry itself, v1/index.json for clients that cannot list folders, and the
    simple index (PEP 503 and PEP 691). Every wheel is first checked against its record.

    Example: telescope hub render registry public
    """
    count = render(registry_folder(folder), output, progress=progress)
    if as_json:
        typer.echo(json.dumps({"output": str(output), "files": count}))
    else:
        typer.echo(f"{output}: {count} files")
