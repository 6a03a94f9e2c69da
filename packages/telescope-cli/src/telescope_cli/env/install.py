"""`telescope env install`, `sync` and `uninstall`."""

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
from telescope_envs.install.sync import prune, sync_environment
from telescope_envs.records.links import unlink
from telescope_envs.records.lockfile import LockedEnvironment, find_lock, lock_path, read_lock
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


def sync(
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail if telescope.lock would have to change.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Ask the registries, and fail for what is yanked, deprecated, has an advisory or "
            "a suspended owner.",
        ),
    ] = False,
    offline: OfflineOption = False,
    prune_others: Annotated[
        bool, typer.Option("--prune", help="Remove environments that telescope.lock does not list.")
    ] = False,
    registry: RegistryOption = None,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Install exactly what telescope.lock lists: the same wheels and the same packages.

    A wheel comes from the registry that the lock names, or from --registry, and must have the hash
    in the lock. Objections of the registry to a release, such as that it is yanked, are shown when
    its wheel is fetched.

    Example: telescope env sync --locked
    """
    path = find_lock()
    if path is None:
        raise ConfigError(
            "there is no telescope.lock in this folder or above; telescope env install NAME writes "
            "one"
        )
    options = InstallOptions(offline=offline, allow_sdist=split_names(allow_sdist), lock=path)
    opening = Opening(offline=offline, tell=progress)

    def opened(named: str) -> Registry:
        return open_registry(registry or named, opening)

    def one(entry: LockedEnvironment) -> Outcome:
        done = sync_environment(
            entry,
            options=options,
            may_change=not locked,
            open_registry=opened,
            progress=progress,
            is_strict=strict,
        )
        return installed(entry.id, done.release, is_new=done.is_new)

    entries = read_lock(path).environments
    done = attempt_all({entry.id: partial(one, entry) for entry in entries}, at_once=_AT_ONCE)
    if prune_others and not any(outcome.error for outcome in done):
        done += [
            Outcome(name=found.id, id=found.id, version=found.version, state="removed")
            for found in prune({entry.id for entry in entries})
        ]
    report(done, as_json=as_json)


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
