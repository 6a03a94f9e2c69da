"""`telescope hub check`."""

import json
from dataclasses import asdict
from textwrap import fill
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption, progress
from telescope_cli.hub.options import FolderArgument, registry_folder
from telescope_envs.rules.check import check_registry
from telescope_envs.rules.tree import (
    CHECKS,
    CheckReport,
    TreeFinding,
)

_WIDTH = 80


def check(
    folder: FolderArgument,
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
    report = check_registry(registry_folder(folder), against=against, progress=progress)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "checks": list(CHECKS)}))
    else:
        typer.echo(as_text(report))
    if report.findings:
        raise typer.Exit(1)


def as_text(report: CheckReport) -> str:
    """Return the report in lines of at most 80 columns, where words allow."""
    blocks = [_finding(finding) for finding in report.findings]
    blocks += [fill(note, _WIDTH) for note in report.notes]
    counts = (
        f"{report.num_environments} environments, {report.num_releases} releases, "
        f"{report.num_commits} commits"
    )
    num = len(report.findings)
    num_made = len(CHECKS) - len(report.unchecked)
    holds = f"{num_made} of {len(CHECKS)} checks made, all passed"
    verdict = f"{num} problem{'s' if num > 1 else ''}" if num else holds
    return "\n".join([*blocks, fill(f"{report.registry}: {verdict} ({counts})", _WIDTH)])


def _finding(finding: TreeFinding) -> str:
    parts = [finding.where, finding.what, f"fix: {finding.fix}"]
    lines = [
        fill(
            part,
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for part in parts
    ]
    return "\n".join([f"[{finding.check}]", *lines, ""])
