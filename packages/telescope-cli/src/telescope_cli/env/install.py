"""`telescope env install` and `uninstall`."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    JsonOption,
    NamesArgument,
    NoLockOption,
    OfflineOption,
    RegistryOption,
    complete_installed,
    progress,
    split_names,
)
from telescope_core.errors import TelescopeError
from telescope_envs.install import install as install_environment
from telescope_envs.install import uninstall as uninstall_environment
from telescope_envs.installing.steps import InstallOptions
from telescope_envs.linked import unlink
from telescope_envs.lockfile import find_lock, lock_path
from telescope_envs.registry import (
    Opening,
    Registry,
    locate_release,
    open_registry,
    parse_request,
)

_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one name that was typed."""

    typed: str
    id: str = ""
    version: str = ""
    state: str
    """installed, unchanged or failed."""
    error: str = ""
    exit_code: int = 0


def install(
    names: NamesArgument,
    registry: RegistryOption = None,
    shared: Annotated[
        bool,
        typer.Option("--shared", help="Install into the Python that runs this command."),
    ] = False,
    no_lock: NoLockOption = False,
    allow_sdist: AllowSdistOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check environments against the registry and install them.

    Each gets a virtual environment of its own, with exactly the packages that telescope.lock then
    names. One that fails keeps no other from being installed. Installing runs its author's code.

    Example: telescope env install math-reasoning countdown@0.1.0
    """
    options = InstallOptions(
        shared=shared,
        offline=offline,
        allow_sdist=split_names(allow_sdist),
        lock=None if no_lock else lock_path(),
    )
    opening = Opening(offline=offline, tell=progress)
    shared_registry = cache(lambda: open_registry(registry, opening))

    def opened(name: str) -> Registry:
        if parse_request(name).registry:
            return locate_release(name, registry, opening).registry
        return shared_registry()

    report(install_all(opened, names, options=options), as_json=as_json)


def install_all(
    registry_of: Callable[[str], Registry], names: Sequence[str], *, options: InstallOptions
) -> list[Outcome]:
    """Install `names`, several at once where each has a place of its own; in the order typed."""

    def one(name: str) -> Outcome:
        try:
            registry = registry_of(name)
            done = install_environment(registry, name, options=options, progress=progress)
        except TelescopeError as error:
            return Outcome(typed=name, state="failed", error=str(error), exit_code=error.exit_code)
        state = "installed" if done.is_new else "unchanged"
        return Outcome(typed=name, id=done.release.id, version=done.release.version, state=state)

    with ThreadPoolExecutor(1 if options.shared else _AT_ONCE) as pool:
        return list(pool.map(one, dict.fromkeys(names)))


def report(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Print what became of each; ends with the exit code of the first that failed."""
    failed = [outcome for outcome in outcomes if outcome.error]
    if as_json:
        typer.echo(json.dumps([_row(outcome) for outcome in outcomes]))
    for outcome in outcomes:
        if outcome.error:
            typer.echo(f"telescope: {outcome.typed}: {outcome.error}", err=True)
        elif not as_json:
            done = "installed" if outcome.state == "installed" else "already installed"
            typer.echo(f"{outcome.id} {outcome.version}: {done}")
    if failed and len(outcomes) > 1:
        typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} are installed", err=True)
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _row(outcome: Outcome) -> dict[str, str]:
    """Return what --json prints of one."""
    row = {"name": outcome.typed, "state": outcome.state}
    if outcome.error:
        return {**row, "error": outcome.error}
    return {**row, "id": outcome.id, "version": outcome.version}


def uninstall(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=complete_installed)
    ],
    no_lock: NoLockOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove installed environments, also from telescope.lock; a shared one's needs stay.

    A linked one is no longer used from its folder, which stays as it is.

    Example: telescope env uninstall countdown
    """
    lock = None if no_lock else find_lock()
    rows: list[dict[str, str]] = []
    for name in names:
        link = unlink(name)
        if link is not None:
            rows.append({"id": link.id, "unlinked": str(link.folder)})
            continue
        found = uninstall_environment(name, lock=lock)
        rows.append({"id": found.id, "version": found.version})
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        done = f"no longer linked to {row['unlinked']}" if "unlinked" in row else "removed"
        typer.echo(f"{row['id']}{' ' + row['version'] if 'version' in row else ''}: {done}")
