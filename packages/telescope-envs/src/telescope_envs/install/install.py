"""Installing and removing environments, in their own virtual environments or in this interpreter.

All checks run before the first change, so a bad wheel changes nothing.
"""

import sys
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

from telescope_core.base.errors import unknown_name
from telescope_core.base.interrupts import raise_in_thread_if_asked
from telescope_envs.install.attestations import asks_for_attestation
from telescope_envs.install.data import installing, remove_leftovers, remove_unused_venvs
from telescope_envs.install.loading import describe_wheel
from telescope_envs.install.packages import (
    install_requirements,
    is_installed,
    missing_requirements,
    uninstall_distribution,
)
from telescope_envs.install.pipeline import (
    Installed,
    address_of,
    checked_wheel,
    choose_release,
    find_active,
    install_isolated,
)
from telescope_envs.install.steps import InstallOptions, Progress, Step, silent
from telescope_envs.install.venv import write_wheel
from telescope_envs.records.files import unwritable
from telescope_envs.records.installed import (
    Installation,
    InstalledEnvironment,
    installed_environments,
    remove_record,
    write_record,
)
from telescope_envs.records.lockfile import change_lock, read_lock
from telescope_envs.records.release import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import matches, parse_request
from telescope_envs.rules.wheel import read_release


def install(
    registry: Registry,
    text: str,
    *,
    options: InstallOptions | None = None,
    progress: Progress = silent,
) -> Installed:
    """Install the release that `text` asks for; `progress` is called with each step.

    Raises RegistryError if the release is refused and EnvironmentLoadError if it cannot be built or
    loaded; in both cases nothing was installed. A shared installation leaves telescope.lock, which
    cannot record it.
    """
    options = options or InstallOptions()
    progress(f"{text}: {Step.RESOLVE}")
    release = choose_release(registry, text, options=options, progress=progress)
    before = find_active(release.id)
    if options.shared:
        done = _install_shared(registry, release, options=options, progress=progress)
        # Only now: what failed has changed nothing.
        if options.lock is not None:
            forget_in_lock(options.lock, release.id)
        with installing(release.id):
            remove_unused_venvs(release.id)
        return done
    done = install_isolated(registry, release, options=options, progress=progress)
    if before is not None and before.is_recorded and before.interpreter == sys.executable:
        uninstall_distribution(before.distribution)
    return done


def uninstall(text: str, *, lock: Path | None = None) -> InstalledEnvironment:
    """Remove an installed environment, and its virtual environment if no project locks it.

    Its entry in the telescope.lock at `lock` is removed as well; if anything fails, both stay. The
    dependencies of a shared installation stay. Returns what was removed.
    """
    found = find_installed(text)
    if found is None:
        known = [environment.id for environment in installed_environments()]
        raise unknown_name("installed environment", text, known)
    remove_leftovers()
    remove_installed(found, lock=lock)
    return found


def remove_installed(found: InstalledEnvironment, *, lock: Path | None = None) -> None:
    """Remove an environment: its package in this Python, its record, and its unused folders.

    Its entry in the telescope.lock at `lock` is removed as well; it comes back if the rest fails.
    """
    with installing(found.id):
        entry = read_lock(lock).find(found.id) if lock is not None else None
        if lock is not None:
            forget_in_lock(lock, found.id)
        try:
            if found.interpreter == sys.executable:
                uninstall_distribution(found.distribution)
            if found.is_recorded:
                remove_record(found.id)
        except BaseException:
            if lock is not None and entry is not None:
                change_lock(lock, lambda now: now.merged([entry]))
            raise
        remove_unused_venvs(found.id)


def find_installed(text: str) -> InstalledEnvironment | None:
    """Return the installed environment that `text` names; None if there is not exactly one.

    A bare name that several owners use names none of them.
    """
    request = parse_request(text)
    fitting = [
        environment
        for environment in installed_environments()
        if request.fits(environment.id, environment.registry)
        and matches(environment.version, request.wanted, environment.sha256)
    ]
    return fitting[0] if len(fitting) == 1 else None


def forget_in_lock(path: Path, environment_id: str) -> None:
    """Remove the entry of owner/name from the telescope.lock at `path`, if there is one."""
    if read_lock(path).find(environment_id) is not None:
        try:
            change_lock(path, lambda lock: lock.without([environment_id]))
        except OSError as error:
            advice = f"it still lists {environment_id}: check the disk space and permissions"
            raise unwritable(str(path), error, advice) from error


def _install_shared(
    registry: Registry, release: Release, *, options: InstallOptions, progress: Progress
) -> Installed:
    """Install into this interpreter without changing the version of any installed package."""
    label = f"{release.id} {release.version}"
    remove_leftovers()
    with installing(release.id, progress):
        found = find_active(release.id)
        is_there = (
            found is not None
            and found.interpreter == sys.executable
            and found.sha256 == release.wheel.sha256
            and not found.is_damaged
        )
        needs_wheel = not is_there or asks_for_attestation(registry.address, release)
        wheel = checked_wheel(registry, release, progress=progress) if needs_wheel else None
        record = found.installation if found is not None and is_there else None
        if record is not None:
            if record.registry != address_of(registry):
                progress(f"{label}: from {address_of(registry)} now, no longer {record.registry}")
                write_record(record.changed(registry=address_of(registry)))
            return Installed(release=release, locked=None, is_new=False)
        assert wheel is not None, "what is not there needs its wheel"
        missing = missing_requirements(release.requires_dist)
        if missing:
            progress(f"{label}: {Step.DEPENDENCIES}: {', '.join(missing)}")
            install_requirements(missing, needed_by=release.id, allow_sdist=options.allow_sdist)
        progress(f"{label}: {Step.PROBE}")
        # Its examples are not counted: that may download a dataset that nobody will use.
        contents = read_release(wheel.read_bytes(), release)
        describe_wheel(contents, counts_examples=False)
        raise_in_thread_if_asked()
        progress(f"{label}: {Step.WHEEL}")
        if is_installed(release.distribution):
            uninstall_distribution(release.distribution)
        write_wheel(contents, Path(sysconfig.get_path("purelib")))
        write_record(
            Installation(
                registry=address_of(registry), installed_at=datetime.now(UTC), release=release
            )
        )
    return Installed(release=release, locked=None, is_new=True)
