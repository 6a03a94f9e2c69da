"""`telescope env init` and `build`: create a project, and build the wheel of a project."""

import getpass
import json
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_core.base.errors import ConfigError
from telescope_envs.publish.build import build_and_inspect, is_in_git, left_out
from telescope_envs.publish.scaffold import TEMPLATES, create_project, plain_name

ProjectArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Project folder (default: the current one).")
]


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="name or owner/name")],
    template: Annotated[
        str, typer.Option("--template", metavar="|".join(TEMPLATES), help="Template to use.")
    ] = "single-turn",
    owner: Annotated[
        str, typer.Option("--owner", help="Who will publish it (default: your user name).")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="New folder (default: ./NAME).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a project: a working environment with tests, for you to modify.

    Example: telescope env init acme/sort-words --template single-turn
    """
    typed_owner, _, bare = name.rpartition("/")
    if typed_owner and owner and typed_owner != owner:
        raise ConfigError(f"{name!r} and --owner {owner!r} name different owners; give one")
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
        ("pytest", "run its tests; they need no model"),
        ("telescope env validate .", "run the checks that publishing requires"),
        ("telescope env link .", f"then: telescope eval {made.id} --model ..."),
        ("telescope env push --dry-run", "do everything except the upload"),
    ):
        typer.echo(f"  {command:<56}{what}".rstrip())


def build(
    project: ProjectArgument = Path(),
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Output folder (default: dist in the project)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build the wheel of a project and inspect it; equal sources give equal bytes.

    Example: telescope env build ./sort-words
    """
    built = build_and_inspect(project, output or project / "dist")
    contents = built.contents
    missing = left_out(project, contents.files)
    for line in missing:
        typer.echo(f"Note: {line}", err=True)
    if as_json:
        about = {"path": str(built.path), "size": built.size, "sha256": built.sha256}
        about |= {"name": contents.entry_name, "version": contents.version, "left_out": missing}
        typer.echo(json.dumps(about))
        return
    typer.echo(f"{built.path}\n{built.size:,} bytes, sha256 {built.sha256}")


def _account_name() -> str:
    try:
        name = plain_name(getpass.getuser())
    except (OSError, KeyError):
        name = ""
    if not name:
        raise ConfigError("the owner is unknown; give --owner, or write owner/name")
    return name
