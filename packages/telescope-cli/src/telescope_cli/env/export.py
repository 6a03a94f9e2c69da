"""`telescope env export`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption, complete_installed
from telescope_core.base.errors import unknown_name
from telescope_core.base.number_text import counted
from telescope_core.finding.locate import locate_environment
from telescope_envs.install.loading import asked

_FORMATS = ("harbor",)


def export(
    name: Annotated[
        str,
        typer.Argument(help="An environment that is used here.", autocompletion=complete_installed),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="|".join(_FORMATS), help="The format to write.")
    ] = _FORMATS[0],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The folder to write; it must be new."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the examples of an environment as task folders of Harbor.

    Only environments whose examples are files can be exported: their class has the method
    task_files. The tests of each task stand in its folder, and its solution too.

    Example: telescope env export my-env --output tasks
    """
    from telescope_adapters.serving.harbor_folders import write_tasks

    if to not in _FORMATS:
        raise unknown_name("format", to, _FORMATS)
    location = locate_environment(name)
    tasks = asked(
        "task_files",
        location.factory,
        interpreter=location.interpreter or sys.executable,
        search_path=location.search_path,
        settings=location.config,
        what=f"nothing was written: {name}",
    )
    folder = output or Path(f"{name.rpartition('/')[2]}-{to}")
    written = write_tasks(folder, tasks, environment=location.id, version=location.version)
    about = {"folder": str(folder), "tasks": [one.name for one in written]}
    tasks_told = counted(len(written), "task")
    told = f"{folder}: {tasks_told}; check them with: telescope env validate harbor:{folder}"
    typer.echo(json.dumps(about) if as_json else told)
