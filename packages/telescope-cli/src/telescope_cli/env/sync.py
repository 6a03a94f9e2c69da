"""`telescope env sync`."""

from functools import partial
from typing import Annotated

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    JsonOption,
    OfflineOption,
    RegistryOption,
    progress,
    split_names,
)
from telescope_cli.env.outcomes import Outcome, attempt_all, installed, report
from telescope_core.base.errors import ConfigError
from telescope_envs.install.steps import InstallOptions
from telescope_envs.install.sync import prune, sync_environment
from telescope_envs.records.lockfile import LockedEnvironment, find_lock, read_lock
from telescope_envs.registry import Opening, Registry, open_registry

_AT_ONCE = 4


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
