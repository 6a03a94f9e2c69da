"""The verbs of `telescope hub` for a registry that is a folder: create, check and render it."""

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption, progress
from telescope_core.base.errors import ConfigError
from telescope_core.base.number_text import counted
from telescope_core.base.terminal import report_width
from telescope_envs.records.schemas import create_registry, write_schemas
from telescope_envs.registry.static_view import render
from telescope_envs.rules.check import check_registry
from telescope_envs.rules.tree import CHECKS, CheckReport, TreeFinding
from telescope_envs.server.hub import is_served, opened_hub

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the registry.")]
ReadFolderArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Folder of the registry, or the --data of telescope hub serve."
    ),
]


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


def check(
    folder: ReadFolderArgument,
    against: Annotated[
        str,
        typer.Option(
            "--against", metavar="GIT-REF", help="Also compare with this branch or commit."
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check a registry: records, wheels, names and git history.

    The exit code is 1 when something is wrong. No code of any wheel is run.

    Example: telescope hub check registry --against origin/main
    """
    if is_served(folder):
        with opened_hub(folder, is_read_only=True) as hub:
            report = check_registry(folder, against=against, files=hub.listing(), progress=progress)
    else:
        report = check_registry(registry_folder(folder), against=against, progress=progress)
    rows = {**asdict(report), "checks": list(CHECKS)}
    typer.echo(json.dumps(rows) if as_json else _text(report))
    if report.findings:
        raise typer.Exit(1)


def _text(report: CheckReport) -> str:
    """Return the report in lines of at most 80 columns, where words allow."""
    blocks = [_finding(finding) for finding in report.findings]
    blocks += [fill(note, report_width()) for note in report.notes]
    counts = (
        f"{counted(report.num_environments, 'environment')}, "
        f"{counted(report.num_releases, 'release')}, {counted(report.num_commits, 'commit')}"
    )
    num = len(report.findings)
    num_made = len(CHECKS) - len(report.unchecked)
    holds = f"{num_made} of {len(CHECKS)} checks made, all passed"
    verdict = counted(num, "problem") if num else holds
    return "\n".join([*blocks, fill(f"{report.registry}: {verdict} ({counts})", report_width())])


def _finding(finding: TreeFinding) -> str:
    parts = [finding.where, finding.what, f"fix: {finding.fix}"]
    lines = [
        fill(
            part,
            report_width(),
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for part in parts
    ]
    return "\n".join([f"[{finding.check}]", *lines, ""])


def render_registry(
    folder: ReadFolderArgument,
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
    if is_served(folder):
        with opened_hub(folder, is_read_only=True) as hub:
            count = render(folder, output, store=hub, progress=progress)
    else:
        count = render(registry_folder(folder), output, progress=progress)
    about = {"output": str(output), "files": count}
    typer.echo(json.dumps(about) if as_json else f"{output}: {count} files")


def schemas(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Write the JSON Schemas of a registry's files into its schema/ folder.

    Example: telescope hub schemas registry
    """
    written = write_schemas(registry_folder(folder))
    paths = "\n".join(f"{folder / path}" for path in written)
    typer.echo(json.dumps(written) if as_json else paths)


def registry_folder(folder: Path) -> Path:
    """Return `folder`; raises ConfigError when it is not a registry."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a registry: it has no config.json; give the folder that "
            "contains config.json and index/"
        )
    return folder
