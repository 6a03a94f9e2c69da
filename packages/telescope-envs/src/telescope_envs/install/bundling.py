"""Using bundles: collecting what goes into one, and installing from one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from telescope_core.errors import ConfigError, RegistryError, unknown_name
from telescope_envs.install.bundle import Part
from telescope_envs.install.data import lock_file
from telescope_envs.install.open_bundle import OpenBundle
from telescope_envs.install.pipeline import (
    checked_wheel,
    choose_release,
    locked_environment,
    record_in_lock,
)
from telescope_envs.install.requirements import (
    lock_requirements,
    python_version,
)
from telescope_envs.install.steps import (
    InstallOptions,
    Progress,
    Step,
)
from telescope_envs.install.sync import (
    OpenRegistry,
    Synced,
    locked_release,
    locked_wheel,
    sync_environment,
)
from telescope_envs.processes.uv import (
    Uv,
)
from telescope_envs.records.files import locked
from telescope_envs.records.lockfile import (
    Lock,
    LockedEnvironment,
    read_lock,
)
from telescope_envs.registry.config import user_file
from telescope_envs.registry.registry import Registry


def part_of_lock(
    entry: LockedEnvironment, open_registry: OpenRegistry, *, progress: Progress
) -> Part:
    """Return what goes into a bundle for an entry of telescope.lock."""
    if entry.python != python_version():
        raise ConfigError(
            f"{entry.id} is locked for Python {entry.python}, but this is {python_version()}; make "
            f"the bundle with Python {entry.python}, or run telescope env sync first"
        )
    release = locked_release(entry, open_registry)
    with locked(lock_file(entry.id), what=f"{entry.id} is being installed", progress=progress):
        wheel = locked_wheel(entry, release, open_registry, progress)
    return Part(entry=entry, release=release, wheel=wheel)


def part_of_registry(
    registry: Registry, text: str, *, options: InstallOptions, progress: Progress
) -> Part:
    """Return what goes into a bundle for a name that is in no lock; installs nothing."""
    release = choose_release(registry, text, options=options, progress=progress)
    with locked(
        lock_file(release.id), what=f"{release.id} is being installed", progress=progress
    ) as held:
        wheel = checked_wheel(registry, release, progress=progress)
        progress(f"{release.id} {release.version}: {Step.LOCK}")
        lines = lock_requirements(release, Uv(heirs=(held,)), options=options)
    entry = locked_environment(registry, release, lines)
    return Part(entry=entry, release=release, wheel=wheel)


def chosen_entries(lock: Lock, names: Sequence[str]) -> list[LockedEnvironment]:
    """Return the entries for `names` (owner/name or bare names); all if there are no names."""
    if not names:
        return list(lock.environments)
    known = {one.id: one for one in lock.environments}
    bare = {one.id.partition("/")[2]: one for one in lock.environments}
    for name in names:
        if name not in known and name not in bare:
            raise unknown_name("environment of the bundle", name, [*known, *bare])
    return [known.get(name) or bare[name] for name in names]


def install_bundled(
    bundle: OpenBundle, entry: LockedEnvironment, *, options: InstallOptions, progress: Progress
) -> Synced:
    """Install one entry of an open bundle, without a network, and add it to telescope.lock."""
    if options.lock is not None:
        _require_same_bytes(entry, options.lock)
    alone = replace(options, offline=True, wheels=bundle.packages, lock=None)
    done = sync_environment(
        entry, options=alone, may_change=False, open_registry=_refuse, progress=progress
    )
    if options.lock is not None:
        record_in_lock(options.lock, entry, progress=progress)
    return done


def _require_same_bytes(entry: LockedEnvironment, lock: Path) -> None:
    known = read_lock(lock).find(entry.id)
    if known is not None and known.version == entry.version and known.sha256 != entry.sha256:
        raise RegistryError(
            f"{entry.id} {entry.version} is locked with wheel sha256 {known.sha256}, but the "
            f"bundle has {entry.sha256}; releases are never replaced: do not install it, and ask "
            "whoever made the bundle"
        )


def _refuse(named: str) -> NoReturn:
    raise RegistryError(
        f"the bundle alone is not enough to install from {named}. Either it lacks a wheel: fetch "
        f"or make it again. Or {user_file()} asks for attestations, and a bundle does not show who "
        "may publish there: install from the registry"
    )
