"""`telescope hub init`: an empty registry in a folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_envs.registry.new import create_registry


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    owner: Annotated[
        list[str], typer.Option("--owner", help="Who may publish in it; several are fine.")
    ],
    name: Annotated[
        str, typer.Option("--name", help="What the registry calls itself (default: the folder).")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Begin a registry: a folder of files, to be published to as it is or served.

    Example: telescope hub init ./registry --owner acme
    """
    written = create_registry(folder, owners=owner, name=name or folder.resolve().name)
    if as_json:
        typer.echo(json.dumps({"registry": str(folder), "files": written}))
        return
    typer.echo(f"{folder}: a registry in which {', '.join(owner)} may publish")
    typer.echo(f"publish to it: telescope env push --registry {folder}")
