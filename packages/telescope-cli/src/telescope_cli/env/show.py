"""`telescope env list` and `info`."""

import json
from datetime import UTC
from typing import Annotated, Any

import typer

from telescope_cli.env.options import JsonOption, RegistryOption
from telescope_envs import (
    InstalledEnvironment,
    Registry,
    find_installed,
    installed_environments,
    open_registry,
)
from telescope_envs.registry import Release, resolve


def list_environments(
    registry: RegistryOption = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Only what is installed here.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List environments: in the registry, and installed here.

    Example: telescope env list --installed
    """
    here = {environment.id: environment for environment in installed_environments()}
    rows = [_installed_row(environment) for environment in here.values()]
    if not installed:
        opened = open_registry(registry)
        newest = {
            name: releases[-1] for name in opened.ids() if (releases := opened.releases(name))
        }
        rows = [_installed_row(here[name]) for name in here if name not in newest]
        rows += [_registry_row(opened, newest[name], here.get(name)) for name in newest]
    rows.sort(key=lambda row: str(row["id"]))
    if as_json:
        typer.echo(json.dumps(rows))
    elif rows:
        _print_table(rows)
    else:
        typer.echo("No environment is installed; see: telescope env list")


def info(
    name: Annotated[str, typer.Argument(help="name, owner/name or owner/name@version")],
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe one environment: rewards, data, network, versions.

    Example: telescope env info math-reasoning
    """
    opened = open_registry(registry)
    release = resolve(opened, name)
    found = find_installed(release.id)
    if as_json:
        about = release.model_dump(mode="json", by_alias=True)
        status = opened.status(release.id).model_dump(mode="json", by_alias=True)
        installed_version = found.version if found is not None else None
        typer.echo(json.dumps({**about, "status": status, "installed": installed_version}))
        return
    for label, text in _facts(opened, release, found):
        typer.echo(f"{label:<12} {text}")


def _installed_row(environment: InstalledEnvironment) -> dict[str, Any]:
    installation = environment.installation
    return {
        "id": environment.id,
        "version": environment.version,
        "installed": environment.version,
        "summary": installation.release.summary if installation else "not from a registry",
    }


def _registry_row(
    registry: Registry, release: Release, here: InstalledEnvironment | None
) -> dict[str, Any]:
    is_deprecated = registry.status(release.id).deprecated is not None
    return {
        "id": release.id,
        "version": release.version,
        "installed": here.version if here is not None else None,
        "summary": f"{'(deprecated) ' if is_deprecated else ''}{release.summary}",
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(str(row["id"])) for row in rows) + 2
    typer.echo(f"{'environment':<{width}}{'version':<10}{'installed':<11}about")
    for row in rows:
        about = str(row["summary"])
        space = max(20, 79 - width - 21)
        about = about if len(about) <= space else f"{about[: space - 3]}..."
        typer.echo(f"{row['id']:<{width}}{row['version']:<10}{row['installed'] or '-':<11}{about}")


def _facts(
    registry: Registry, release: Release, found: InstalledEnvironment | None
) -> list[tuple[str, str]]:
    status = registry.status(release.id)
    reward = release.reward
    sizes = ", ".join(f"{split} {size or 'endless'}" for split, size in release.splits.items())
    facts = [
        ("environment", f"{release.id} {release.version}"),
        ("about", release.summary),
        ("installed", found.version if found is not None else "no"),
        ("versions", ", ".join(known.version for known in registry.releases(release.id))),
        ("examples", sizes),
        ("reward", f"{reward.minimum:g} to {reward.maximum:g}, solved from {reward.success:g}"),
        ("network", release.network),
        ("secrets", ", ".join(release.secrets) or "none"),
        ("python", release.requires_python),
        ("needs", ", ".join(text for text in release.requires_dist if "extra ==" not in text)),
        ("wheel", f"{release.wheel.filename}, {release.wheel.size} bytes"),
        ("sha256", release.wheel.sha256),
        ("validated", release.validation.verdict),
        ("publisher", f"{release.publisher}, {release.published_at.astimezone(UTC):%Y-%m-%d}"),
        ("licence", release.license),
        ("registry", registry.address),
    ]
    facts += [("data", f"{d.repo} at {d.revision[:12]} ({d.when})") for d in release.datasets]
    facts += [("yanked", f"{version}: {why}") for version, why in status.yanked.items()]
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        facts.append(("deprecated", f"{status.deprecated.reason}{instead}"))
    return facts
