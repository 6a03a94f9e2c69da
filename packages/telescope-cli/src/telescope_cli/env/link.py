"""`telescope env link`."""

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from telescope_cli.env.options import AllowSdistOption, JsonOption, split_names
from telescope_core.base.errors import ConfigError
from telescope_core.base.json_text import read_json
from telescope_core.base.secret_names import secrets_line
from telescope_core.finding.schemes import adapted, require_adapted, schemes
from telescope_envs.install.adapted import framework_version, link_adapted
from telescope_envs.install.loading import link as link_folder


def link(
    target: Annotated[
        str, typer.Argument(metavar="DIR|SCHEME:ID", help="Folder of the project, or SCHEME:ID.")
    ],
    packages: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE", help="Install this beside the framework."),
    ] = None,
    settings: Annotated[
        str, typer.Option("--settings", metavar="JSON", help="Settings for each use.")
    ] = "{}",
    secrets: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Let it read this environment variable."),
    ] = None,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Use an environment from its project folder, or one of another framework.

    The code of a folder runs in the process that uses it, and each run uses the current files.
    SCHEME:ID is gym:ID, textarena:ID, openenv:URL, nemo-gym:URL, ors:URL, verifiers:NAME,
    inspect:TASK or harbor:FOLDER.
    Frameworks get a virtual environment of their own. An environment of another framework sees none
    of your environment variables but those that --secret names, here and in each eval and run.
    `telescope env uninstall` removes the link.

    Example: telescope env link gym:FrozenLake-v1
    """
    looks_adapted = ":" in target or target in schemes()
    if adapted(target) is None and (Path(target).exists() or not looks_adapted):
        if packages or settings != "{}" or secrets or allow_sdist:
            raise ConfigError(
                "--with, --settings, --secret and --allow-sdist are for SCHEME:ID; leave them out"
            )
        project = link_folder(Path(target))
        about = {"id": project.id, "version": project.version, "folder": str(project.folder)}
    else:
        require_adapted(target)
        found = link_adapted(
            target,
            packages=packages or (),
            settings=_settings(settings),
            secrets=secrets or (),
            allow_sdist=split_names(allow_sdist),
        )
        about = {
            "id": found.name,
            "version": framework_version(found),
            "python": found.interpreter,
            "secrets": list(found.secrets),
        }
        if line := secrets_line(found.name, found.secrets, os.environ):
            typer.echo(line, err=True)
        if require_adapted(found.name).frameworks[0].is_elsewhere:
            from telescope_adapters.servers import why_silent

            # It may be started after the link.
            if why := asyncio.run(why_silent(found.factory, found.config)):
                silent = f"{found.name} is linked, but cannot be played now: {why}"
                typer.echo(f"telescope: {silent}", err=True)
    if as_json:
        typer.echo(json.dumps(about))
        return
    where = about.get("folder") or about["python"] or "this Python"
    typer.echo(f"{about['id']} {about['version']}: linked to {where}")


def _settings(text: str) -> dict[str, Any]:
    try:
        found = read_json(text)
    except ValueError as error:
        raise ConfigError(f"--settings: {error}; expected a JSON object, got {text!r}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--settings: expected a JSON object, got {text!r}")
    return cast(dict[str, Any], found)
