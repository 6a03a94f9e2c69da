"""Make the installed packages match telescope.lock: the same wheels, the same packages."""

from collections.abc import Callable
from pathlib import Path

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_core.base.interrupts import raise_in_thread_if_asked
from telescope_envs.install.attestations import asks_for_attestation, require_kept_attestation
from telescope_envs.install.data import (
    cached_attestation,
    cached_wheel,
    find_built,
    find_cached,
    installing,
    remember_project,
    remove_leftovers,
    remove_unused_venvs,
)
from telescope_envs.install.install import remove_installed
from telescope_envs.install.pipeline import (
    Installed,
    activate,
    checked_wheel,
    fits_here,
    install_isolated,
    planned_installation,
    uv_of,
)
from telescope_envs.install.steps import InstallOptions, Progress
from telescope_envs.install.venv import build_venv
from telescope_envs.records.installed import InstalledEnvironment, installed_environments
from telescope_envs.records.lockfile import LockedEnvironment
from telescope_envs.records.release import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import notices, removals
from telescope_envs.rules.wheel import read_release

OpenRegistry = Callable[[str], Registry]


def sync_environment(
    entry: LockedEnvironment,
    *,
    options: InstallOptions,
    may_change: bool,
    open_registry: OpenRegistry,
    progress: Progress,
    is_strict: bool = False,
) -> Installed:
    """Install and activate `entry`, its wheel and its packages, each checked by sha256.

    An entry that does not fit this Python or this telescope-core is locked again if it
    `may_change`; otherwise ConfigError is raised. Objections of its registry are reported when the
    wheel is fetched. If `is_strict`, the registry is always asked, and its objections raise
    RegistryError, as does a release that it lacks or has with another wheel.
    """
    remove_leftovers()
    built = None if options.reinstall else find_built(entry)
    release = built.release if built is not None else locked_release(entry, open_registry)
    if is_strict or (built is None and cached_wheel(release) is None):
        registry = open_registry(entry.registry)
        warnings = notices(registry, entry.id, entry.version)
        if warnings and is_strict:
            raise RegistryError(
                f"--strict: {'; '.join(warnings)}. Choose another release (telescope env update), "
                "or leave --strict out"
            )
        for warning in warnings:
            progress(f"warning: {warning}")
        if is_strict:
            _published(registry, entry)
    if not fits_here(entry, release):
        if not may_change:
            raise ConfigError(
                f"--locked: the entry of {entry.id} in telescope.lock would have to change: it is "
                f"for Python {entry.python}, or lacks a package that this telescope-core or its "
                "wheel needs here; run telescope env sync without --locked and commit the new "
                "lock, or use the Python and the Telescope that it was made with"
            )
        registry = open_registry(entry.registry)
        return install_isolated(registry, release, options=options, progress=progress)
    with installing(entry.id, progress) as held:
        is_built = not options.reinstall and find_built(entry) is not None
        if not is_built or asks_for_attestation(entry.registry, release):
            wheel = locked_wheel(
                entry, release, open_registry, progress, is_offline=options.offline
            )
            if not is_built:
                planned = planned_installation(entry.registry, release, entry)
                build_venv(planned, wheel, uv_of(options, held), options=options, progress=progress)
        raise_in_thread_if_asked()
        is_new = activate(entry, progress=progress)
        if options.lock is not None:
            remember_project(options.lock)
        remove_unused_venvs(entry.id)
    return Installed(release=release, locked=entry, is_new=is_new or options.reinstall)


def prune(kept: set[str]) -> list[InstalledEnvironment]:
    """Remove every environment that came from a registry except `kept`; returns those removed."""
    removed: list[InstalledEnvironment] = []
    for found in installed_environments():
        if found.id in kept or not found.is_recorded:
            continue
        remove_installed(found)
        removed.append(found)
    return removed


def locked_release(entry: LockedEnvironment, open_registry: OpenRegistry) -> Release:
    """Return the record of the locked wheel: from the cache, else from its registry."""
    cached = find_cached(entry.sha256)
    if cached is not None and cached_wheel(cached.release) is not None:
        return cached.release
    return _published(open_registry(entry.registry), entry)


def _published(registry: Registry, entry: LockedEnvironment) -> Release:
    """Return the record of the locked wheel; RegistryError if the registry does not have it."""
    found = registry.read_releases(entry.id)
    for release in found.releases:
        if (release.version, release.wheel.sha256) == (entry.version, entry.sha256):
            return release
    there = {release.version: release for release in found.releases}
    if entry.version in there:
        raise RegistryError(
            f"{entry.id} {entry.version} is locked with wheel sha256 {entry.sha256}, but "
            f"{registry.address} now has {there[entry.version].wheel.sha256}; releases are never "
            "replaced: tell the registry's owner, and do not install it"
        )
    if removed := removals(registry, entry.id, entry.version):
        raise RegistryError(
            f"{removed[0]} ({registry.address}); to lock another release, run: telescope env "
            f"install {entry.id}"
        )
    why = next((one.why for one in found.unreadable if one.version == entry.version), "")
    raise RegistryError(
        f"{entry.id} {entry.version} (sha256 {entry.sha256}) is locked, but {registry.address} "
        f"does not have it{f' in a line that can be used ({why})' if why else ''}; name a registry "
        "that does with --registry"
    )


def locked_wheel(
    entry: LockedEnvironment,
    release: Release,
    open_registry: OpenRegistry,
    progress: Progress,
    *,
    is_offline: bool = False,
) -> Path:
    """Return the inspected wheel.

    The registry is opened only if the cache lacks it or the user asks for an attestation. If that
    fails offline, the attestation that was kept with the wheel is checked.
    """
    wheel = cached_wheel(release)
    is_asked = asks_for_attestation(entry.registry, release)
    if wheel is None or is_asked:
        try:
            registry = open_registry(entry.registry)
        except RegistryError:
            if wheel is None or not is_offline:
                raise
        else:
            return checked_wheel(registry, release, progress=progress)
    data = wheel.read_bytes()
    read_release(data, release)
    if is_asked:
        kept = cached_attestation(release)
        attested = require_kept_attestation(release, data, kept)
        progress(f"{release.id} {release.version}: attested by {attested.by}")
    return wheel
