"""`telescope env push`: publish a project."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    FixtureRowsOption,
    JsonOption,
    RegistryOption,
    given_settings,
    progress,
    split_names,
)
from telescope_cli.env.project import ProjectArgument
from telescope_core.base.errors import ConfigError
from telescope_envs.publish.attesting import AttestMode
from telescope_envs.publish.push import PushOptions, PushResult, PushState
from telescope_envs.publish.push import push as push_project
from telescope_envs.records.projects import require_project


def push(
    context: typer.Context,
    project: ProjectArgument = Path(),
    registry: RegistryOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do everything except the upload; show the record.")
    ] = False,
    bump: Annotated[
        str,
        typer.Option("--bump", metavar="patch|minor|major|VERSION", help="Raise the version."),
    ] = "",
    commit: Annotated[
        bool, typer.Option("--commit", help="Commit the raised version to git.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Publish without asking.")] = False,
    attest: Annotated[
        AttestMode, typer.Option("--attest", help="Sign with Sigstore as this CI job.")
    ] = AttestMode.AUTO,
    trust_config: Annotated[
        Path | None,
        typer.Option(
            "--trust-config", metavar="FILE", help="Trust configuration of a non-public Sigstore."
        ),
    ] = None,
    allow_sdist: AllowSdistOption = None,
    fixture_rows: FixtureRowsOption = False,
    new_name_ok: Annotated[
        bool, typer.Option("--new-name-ok", help="Allow a new name that is similar to another.")
    ] = False,
    allow_no_git: Annotated[
        bool, typer.Option("--allow-no-git", help="Publish a project that is not in git.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish a project: build, check, validate, upload, and add it to the index.

    Settings with which it is validated, such as the address of a judge, are given as
    --env.NAME VALUE; they are no part of the release.

    Example: telescope env push ./sort-words --bump minor --commit
    """
    require_project(project)
    if not (yes or dry_run or sys.stdin.isatty()):
        raise ConfigError(
            "nobody can be asked: standard input is no terminal; add --yes to publish, or --dry-run"
        )
    options = PushOptions(
        registry=registry,
        dry_run=dry_run,
        bump=bump,
        commit=commit,
        allow_sdist=split_names(allow_sdist),
        fixture_rows=fixture_rows,
        settings=given_settings(context),
        new_name_ok=new_name_ok,
        allow_no_git=allow_no_git,
        attest=attest,
        trust_config=trust_config,
        progress=progress,
        confirm=(lambda question: True) if yes else _ask,
    )
    result = push_project(project, options)
    if as_json:
        typer.echo(json.dumps(_as_data(result)))
        return
    if result.state is PushState.WOULD_BE_PUBLISHED:
        _show(result)
    typer.echo(f"{result.release.id} {result.release.version}: {result.state} ({result.registry})")
    if result.state is PushState.PUBLISHED:
        where = f" --registry {shlex.quote(registry)}" if registry else ""
        typer.echo(f"to install it, run: telescope env install {result.release.id}{where}")


def _ask(question: str) -> bool:
    return typer.confirm(f"{question} A release is never replaced", err=True)


def _show(result: PushResult) -> None:
    typer.echo(result.release.as_json(indent=2).decode())
    if result.previous is None:
        typer.echo("\nThis would be the first release.\n")
        return
    typer.echo(f"\nChanges since {result.previous.version}:")
    for change in result.changes:
        typer.echo(f"  {change}")
    if not result.changes:
        typer.echo("  only the code")
    for warning in result.warnings:
        typer.echo(f"  warning: {warning}")
    typer.echo("")


def _as_data(result: PushResult) -> dict[str, Any]:
    return {
        "state": result.state,
        "registry": result.registry,
        "release": result.release.as_table(),
        "previous": result.previous.version if result.previous else None,
        "changes": [
            {"what": one.what, "before": one.before, "after": one.after} for one in result.changes
        ],
        "warnings": list(result.warnings),
    }
