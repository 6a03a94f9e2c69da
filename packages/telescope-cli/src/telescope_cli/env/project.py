"""`telescope env init` and `build`: a new project, and the wheel of one."""

import getpass
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_core.errors import ConfigError
from telescope_envs.authoring.build import build_and_inspect
from telescope_envs.authoring.scaffold import TEMPLATES, create_project
from telescope_envs.authoring.sources import is_in_git

ProjectArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of the project (default: this one).")
]


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name or owner/name")],
    template: Annotated[
        str, typer.Option("--template", metavar="|".join(TEMPLATES), help="What to begin from.")
    ] = "single-turn",
    owner: Annotated[
        str, typer.Option("--owner", help="Who will publish it (default: your account's name).")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="New folder (default: ./NAME).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Begin a project: an environment that works, with tests, ready to be changed.

    Example: telescope env init acme/sort-words --template single-turn
    """
    typed_owner, _, bare = name.rpartition("/")
    if typed_owner and owner and typed_owner != owner:
        raise ConfigError(f"{name!r} says one owner and --owner {owner!r} another; give one")
    chosen = typed_owner or owner or _account_name()
    made = create_project(folder or Path(bare), owner=chosen, name=bare, template=template)
    if as_json:
        about = {"id": made.id, "folder": str(made.folder), "factory": made.factory}
        typer.echo(json.dumps({**about, "files": made.files}))
        return
    typer.echo(f"{made.id}: {len(made.files)} files in {made.folder}")
    begin = "" if is_in_git(made.folder) else "git init && "
    typer.echo("\nNext:\n")
    for command, what in (
        (f"cd {made.folder}", ""),
        (f"{begin}git add . && git commit -m 'First version'", ""),
        ("pytest", "its tests, without a model"),
        ("telescope env validate .", "what publishing asks for"),
        ("telescope env link .", f"then: telescope eval {made.id} --model ..."),
        ("telescope env push --dry-run", "everything but the upload"),
    ):
        typer.echo(f"  {command:<56}{what}".rstrip())


def build(
    project: ProjectArgument = Path(),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Default: DIR/dist.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build the wheel of a project and inspect it; equal sources give equal bytes.

    Example: telescope env build ./sort-words
    """
    built = build_and_inspect(project, output or project / "dist")
    if as_json:
        about = {"path": str(built.path), "size": built.size, "sha256": built.sha256}
        contents = built.contents
        typer.echo(json.dumps({**about, "name": contents.entry_name, "version": contents.version}))
        return
    typer.echo(f"{built.path}\n{built.size:,} bytes, sha256 {built.sha256}")


def _account_name() -> str:
    try:
        name = re.sub(r"[^a-z0-9]+", "-", getpass.getuser().lower()).strip("-")
    except (OSError, KeyError):
        name = ""
    if not name:
        raise ConfigError("who will publish it? Give --owner, or write owner/name")
    return name
