"""`telescope env sync`."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    JsonOption,
    OfflineOption,
    RegistryOption,
    progress,
    split_names,
)
from telescope_core.errors import ConfigError, TelescopeError
from telescope_envs.installing.steps import InstallOptions
from telescope_envs.installing.sync import prune, sync_environment
from telescope_envs.lockfile import LockedEnvironment, find_lock, read_lock
from telescope_envs.registry import Opening, Registry, open_registry

_AT_ONCE = 4


def sync(
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail where telescope.lock would have to change.")
    ] = False,
    offline: OfflineOption = False,
    prune_others: Annotated[
        bool, typer.Option("--prune", help="Remove installed environments that it does not name.")
    ] = False,
    registry: RegistryOption = None,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Install exactly what telescope.lock names: the same wheels, the same packages.

    A wheel comes from the registry that the lock names, or from --registry; its hash decides.

    Example: telescope env sync --locked
    """
    path = find_lock()
    if path is None:
        raise ConfigError(
            "there is no telescope.lock here or above; telescope env install NAME writes one"
        )
    options = InstallOptions(offline=offline, allow_sdist=split_names(allow_sdist), lock=path)
    opening = Opening(offline=offline, tell=progress)

    def opened(named: str) -> Registry:
        return open_registry(registry or named, opening)

    def one(entry: LockedEnvironment) -> dict[str, Any]:
        row: dict[str, Any] = {"id": entry.id, "version": entry.version}
        try:
            done = sync_environment(
                entry,
                options=options,
                may_change=not locked,
                open_registry=opened,
                progress=progress,
            )
        except TelescopeError as error:
            return {**row, "state": "failed", "error": str(error), "exit_code": error.exit_code}
        return {**row, "state": "installed" if done.is_new else "unchanged"}

    entries = read_lock(path).environments
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = list(pool.map(one, entries))
    if prune_others and not any("error" in row for row in rows):
        removed = prune({entry.id for entry in entries})
        rows += [{"id": name, "state": "removed"} for name in removed]
    _print(rows, as_json=as_json)


def _print(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    failed = [row for row in rows if "error" in row]
    if as_json:
        shown = [{key: row[key] for key in row if key != "exit_code"} for row in rows]
        typer.echo(json.dumps(shown))
    for row in rows:
        if "error" in row:
            typer.echo(f"telescope: {row['id']}: {row['error']}", err=True)
        elif not as_json:
            typer.echo(f"{row['id']} {row.get('version', '')}: {row['state']}")
    if failed:
        raise typer.Exit(failed[0]["exit_code"])
