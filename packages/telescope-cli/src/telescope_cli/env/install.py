"""`telescope env install` and `uninstall`."""

import json
from typing import Annotated, Any

import typer

from telescope_cli.env.options import (
    JsonOption,
    NamesArgument,
    RegistryOption,
    complete_installed,
    progress,
)
from telescope_envs import install as install_environment
from telescope_envs import open_registry
from telescope_envs import uninstall as uninstall_environment
from telescope_envs.registry import resolve


def install(
    names: NamesArgument,
    registry: RegistryOption = None,
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Give each a virtual environment of its own.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check environments against the registry and install them.

    They are installed into the Python that runs this command, or with --isolated into virtual
    environments of their own. Installing an environment runs its author's code.

    Example: telescope env install math-reasoning countdown@0.1.0
    """
    opened = open_registry(registry)
    releases = [resolve(opened, name) for name in names]
    rows: list[dict[str, Any]] = []
    for name, release in zip(names, releases, strict=True):
        result = install_environment(opened, name, isolated=isolated, progress=progress)
        rows.append({"id": release.id, "version": release.version, "installed": result.is_new})
        if not as_json:
            done = "installed" if result.is_new else "already installed"
            typer.echo(f"{release.id} {release.version}: {done}")
    if as_json:
        typer.echo(json.dumps(rows))


def uninstall(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=complete_installed)
    ],
    as_json: JsonOption = False,
) -> None:
    """Remove installed environments; what they needed stays.

    Example: telescope env uninstall countdown
    """
    removed = [uninstall_environment(name) for name in names]
    if as_json:
        typer.echo(json.dumps([{"id": found.id, "version": found.version} for found in removed]))
        return
    for found in removed:
        typer.echo(f"{found.id} {found.version}: removed")
