"""`telescope hub init`: create an empty registry in a folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_envs.records.schemas import create_registry


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    owner: Annotated[
        list[str], typer.Option("--owner", help="Owner that may publish to it; repeatable.")
    ],
    name: Annotated[
        str, typer.Option("--name", help="Name of the registry (default: the folder's name).")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Create a registry: a folder of files that one can publish to, or host.

    Example: telescope hub init ./registry --owner acme
    """
    written = create_registry(folder, owners=owner, name=name or folder.resolve().name)
    if as_json:
        typer.echo(json.dumps({"registry": str(folder), "files": written}))
        return
    typer.echo(f"{folder}: a registry to which {', '.join(owner)} may publish")
    typer.echo(f"to publish to it, run: telescope env push --registry {folder}")
