"""`telescope env install` and `uninstall`."""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    JsonOption,
    NoLockOption,
    OfflineOption,
    OptionalNamesArgument,
    RegistryOption,
    complete_installed,
    progress,
    split_names,
)
from telescope_cli.env.outcomes import Outcome, attempt_all, installed, report
from telescope_core.base.errors import ConfigError
from telescope_envs.install.adapted import unlink_adapted
from telescope_envs.install.install import install as install_environment
from telescope_envs.install.install import uninstall as uninstall_environment
from telescope_envs.install.steps import InstallOptions
from telescope_envs.records.links import unlink
from telescope_envs.records.lockfile import find_lock, lock_path
from telescope_envs.registry import Opening, Registry, open_registry, parse_request
from telescope_envs.registry.lookup import open_registry_of

_AT_ONCE = 4


def install(
    names: OptionalNamesArgument = None,
    from_bundle: Annotated[
        Path | None,
        typer.Option(
            "--from-bundle",
            metavar="FILE",
            help="Install from a file that telescope env bundle wrote, without network access.",
        ),
    ] = None,
    max_bundle_gb: Annotated[
        int,
        typer.Option(
            "--max-bundle-gb", metavar="N", min=1, help="Largest bundle to install from, in GiB."
        ),
    ] = 10,
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

    Each gets its own virtual environment and its packages are recorded in telescope.lock. If one
    fails, the others are still installed. Installing an environment runs its author's code.

    Example: telescope env install math-reasoning countdown@0.1.0
    """
    options = InstallOptions(
        shared=shared,
        offline=offline,
        allow_sdist=split_names(allow_sdist),
        lock=None if no_lock else lock_path(),
    )
    if from_bundle is not None and (shared or registry):
        raise ConfigError("--from-bundle cannot be combined with --shared or --registry")
    if from_bundle is not None:
        from telescope_cli.env.bundle import installed_from_bundle

        done = installed_from_bundle(
            from_bundle, names or [], options=options, max_bytes=max_bundle_gb * 2**30
        )
        report(done, as_json=as_json)
        return
    if not names:
        raise ConfigError("give at least one NAME, such as math-reasoning, or --from-bundle FILE")
    opening = Opening(offline=offline, tell=progress)
    shared_registry = cache(lambda: open_registry(registry, opening))

    def opened(name: str) -> Registry:
        if parse_request(name).registry:
            return open_registry_of(name, registry, opening)
        return shared_registry()

    report(install_all(opened, names, options=options), as_json=as_json)


def install_all(
    registry_of: Callable[[str], Registry], names: Sequence[str], *, options: InstallOptions
) -> list[Outcome]:
    """Install `names` and return their outcomes in that order.

    Several install at once, unless they are installed into the shared Python.
    """

    def one(name: str) -> Outcome:
        registry = registry_of(name)
        done = install_environment(registry, name, options=options, progress=progress)
        return installed(name, done.release, is_new=done.is_new)

    at_once = 1 if options.shared else _AT_ONCE
    return attempt_all({name: partial(one, name) for name in names}, at_once=at_once)


def uninstall(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", autocompletion=complete_installed)
    ],
    no_lock: NoLockOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove installed environments, also from telescope.lock.

    The dependencies of one installed with --shared stay. A linked environment is unlinked, and its
    folder is not changed.

    Example: telescope env uninstall countdown
    """
    lock = None if no_lock else find_lock()
    rows: list[dict[str, str]] = []
    for name in names:
        foreign = unlink_adapted(name)
        if foreign is not None:
            rows.append({"id": name, "unlinked": foreign.interpreter or "this Python"})
            continue
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
