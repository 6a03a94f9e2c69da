"""`telescope hub schemas`."""

import json

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import FolderArgument, registry_folder
from telescope_envs.records.schemas import write_schemas


def schemas(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Write the JSON Schemas of a registry's files into its schema/ folder.

    Example: telescope hub schemas registry
    """
    written = write_schemas(registry_folder(folder))
    if as_json:
        typer.echo(json.dumps(written))
        return
    for path in written:
        typer.echo(folder / path)
