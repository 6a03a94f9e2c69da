"""Install one environment from a registry into its own virtual environment.

Each step is one function and announces itself. However an installation ends, even by kill -9, the
next one finds nothing half-made in use: a folder gets its final name only when it is complete, and
the record is written last.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import Version

from telescope_core.base.errors import RegistryError
from telescope_core.base.interrupts import raise_in_thread_if_asked
from telescope_envs.install.attestations import asks_for_attestation, require_attestation
from telescope_envs.install.data import (
    cached_wheel,
    find_built,
    installing,
    python_of,
    remember_project,
    remove_leftovers,
    remove_unused_venvs,
    store_wheel,
    venv_folder,
)
from telescope_envs.install.requirements import (
    check_needs,
    direct_needs,
    lock_requirements,
    python_version,
    serve,
)
from telescope_envs.install.steps import InstallOptions, Progress, Step
from telescope_envs.install.venv import build_venv
from telescope_envs.processes.uv import Uv
from telescope_envs.records.files import unwritable
from telescope_envs.records.installed import (
    Installation,
    InstalledEnvironment,
    installed_environments,
    write_record,
)
from telescope_envs.records.lockfile import (
    LockedDataset,
    LockedEnvironment,
    change_lock,
    digest_of,
    read_lock,
)
from telescope_envs.records.release import Release, Status
from telescope_envs.registry.config import Address, parse_address
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import Request, parse_request, resolve_with_warnings
from telescope_envs.rules.wheel import read_release


def check_no_downgrade(
    release: Release,
    request: Request,
    *,
    installed: InstalledEnvironment | None,
    entry: LockedEnvironment | None,
    status: Status,
) -> None:
    """Raise RegistryError for an older version than the one in use, unless requested exactly.

    A registry that was rolled back, or a mirror that lags, offers an older version too.
    """
    if request.is_exact:
        return
    in_use = {"installed": installed.version if installed is not None else ""}
    in_use["in telescope.lock"] = entry.version if entry is not None else ""
    for where, version in in_use.items():
        if version and Version(version) > Version(release.version):
            reason = status.yanked.get(version)
            why = f" ({version} is yanked: {reason})" if reason is not None else ""
            fits = f" that fits {request.wanted!r}" if request.wanted else ""
            raise RegistryError(
                f"{release.id} {version} is {where}, but the registry offers {release.version} as "
                f"the newest{fits}{why}; to go back, type it exactly: "
                f"{release.id}@{release.version}"
            )


def check_same_bytes(
    release: Release,
    registry: Registry,
    *,
    installed: InstalledEnvironment | None,
    entry: LockedEnvironment | None,
) -> None:
    """Raise RegistryError if the locked version, or the installed one, now has another wheel.

    Another registry than the one it was installed from may have a version with the same name.
    """
    known: dict[str, str] = {}
    place = parse_address(registry.address)
    if entry is not None and entry.version == release.version:
        if entry.sha256 != release.wheel.sha256 and not _is_from(entry.registry, place):
            raise RegistryError(
                f"{release.id} {release.version} is locked from the registry {entry.registry}, and "
                f"{registry.address} has another wheel of the same name and version. To keep it, "
                f"name the registry of the lock: --registry {entry.registry}. To switch, remove it "
                f"from telescope.lock (telescope env uninstall {release.id}) and install this one; "
                "if the registries are meant to be copies, tell their owners instead"
            )
        known["locked"] = entry.sha256
    if installed is not None and _is_from(installed.registry, place) and not installed.is_damaged:
        known["installed"] = installed.sha256 if installed.version == release.version else ""
    for how, sha256 in known.items():
        if sha256 not in ("", release.wheel.sha256):
            raise RegistryError(
                f"{release.id} {release.version} is {how} with wheel sha256 {sha256}, but the "
                f"registry now has {release.wheel.sha256}; releases are never replaced: tell the "
                "registry's owner, and do not install it"
            )


def _is_from(registry: str, place: Address) -> bool:
    return parse_address(registry).is_place_of(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The result of installing one environment."""

    release: Release
    locked: LockedEnvironment | None
    """Its present lock entry; None if it shares this interpreter, whose packages are not locked."""
    is_new: bool
    """False if the same release with the same packages was already active."""


def choose_release(
    registry: Registry, text: str, *, options: InstallOptions, progress: Progress
) -> Release:
    """Return the release that `text` asks for; raises if it must not or cannot run here."""
    request = parse_request(text)
    resolution = resolve_with_warnings(registry, text)
    release = resolution.release
    check_needs(release)
    entry = read_lock(options.lock).find(release.id) if options.lock is not None else None
    installed = find_active(release.id)
    check_no_downgrade(
        release,
        request,
        installed=installed,
        entry=entry,
        status=resolution.status,
    )
    check_same_bytes(release, registry, installed=installed, entry=entry)
    for warning in resolution.warnings:
        progress(f"warning: {warning}")
    used, place = entry or installed, parse_address(registry.address)
    is_other = used is not None and used.sha256 != release.wheel.sha256
    if used is not None and is_other and used.registry and not _is_from(used.registry, place):
        progress(
            f"warning: {release.id} {used.version} is from {used.registry}, but {release.version} "
            f"is from {registry.address}: equal names need not be one environment"
        )
    return release


def install_isolated(
    registry: Registry, release: Release, *, options: InstallOptions, progress: Progress
) -> Installed:
    """Install `release` into its own virtual environment, and make it the active one.

    If it is there from another place, its record and its lock entry name `registry` from now on.
    """
    label = f"{release.id} {release.version}"
    remove_leftovers()
    with installing(release.id, progress) as held:
        uv = uv_of(options, held)
        locked = read_lock(options.lock).find(release.id) if options.lock is not None else None
        active = find_active(release.id)
        # A damaged record is written anew at the end of the installation.
        record = active.installation if active is not None and not active.is_damaged else None
        known = (locked, record.locked if record is not None else None)
        entry = next((one for one in known if one is not None and fits_here(one, release)), None)
        if entry is not None and entry.registry != address_of(registry):
            progress(f"{label}: from {address_of(registry)} now, no longer {entry.registry}")
            entry = entry.changed(registry=address_of(registry), revision=registry.store.revision)
        is_asked = asks_for_attestation(address_of(registry), release)
        is_there = entry is not None and find_built(entry) is not None
        is_built = is_there and not options.reinstall
        if is_asked or not is_built:
            wheel = checked_wheel(registry, release, progress=progress)
            if entry is None:
                progress(f"{label}: {Step.LOCK}")
                lines = lock_requirements(release, uv, options=options)
                entry = locked_environment(registry, release, lines)
            if not is_built:
                planned = planned_installation(address_of(registry), release, entry)
                build_venv(planned, wheel, uv, options=options, progress=progress)
        assert entry is not None, "what is built has an entry"
        raise_in_thread_if_asked()  # what is in use is in telescope.lock, too
        is_new = activate(entry, progress=progress, moves=True)
        if options.lock is not None:
            record_in_lock(options.lock, entry, progress=progress)
        remove_unused_venvs(release.id)
    return Installed(release=release, locked=entry, is_new=is_new or options.reinstall)


def uv_of(options: InstallOptions, held: int) -> Uv:
    """Return uv for one installation, which inherits the lock `held` of its environment."""
    return Uv(
        offline=options.offline,
        wheels=options.wheels,
        heirs=(held,),
        distrusts_cache=options.reinstall,
    )


def checked_wheel(registry: Registry, release: Release, *, progress: Progress) -> Path:
    """Return the wheel of `release` after checking its hash and contents, without running it.

    It is put into the cache only after these checks.
    """
    label = f"{release.id} {release.version}"
    cached = cached_wheel(release)
    if cached is None:
        progress(f"{label}: {Step.DOWNLOAD}")
    data = registry.wheel_bytes(release) if cached is None else cached.read_bytes()
    progress(f"{label}: {Step.INSPECT}")
    read_release(data, release)
    attested = require_attestation(registry, release, data)
    if attested.by:
        progress(f"{label}: attested by {attested.by}")
    return cached or store_wheel(
        data, release, registry=address_of(registry), attestation=attested.data
    )


def planned_installation(registry: str, release: Release, entry: LockedEnvironment) -> Installation:
    """Return the record of the virtual environment to build for `entry`."""
    return Installation(
        registry=registry,
        installed_at=datetime.now(UTC),
        release=release,
        interpreter=str(python_of(venv_folder(entry))),
        locked=entry,
    )


def activate(entry: LockedEnvironment, *, progress: Progress, moves: bool = False) -> bool:
    """Make the built virtual environment of `entry` the one in use; False if it already is.

    With `moves`, its record then names the registry of `entry`, also if it named another. The
    caller holds the lock of the environment.
    """
    built = find_built(entry)
    assert built is not None, "only what is built is activated"
    active = find_active(entry.id)
    is_active = active is not None and active.interpreter == built.interpreter
    is_complete = active is not None and is_active and _records(active, entry)
    if active is not None and is_complete and (active.registry == entry.registry or not moves):
        return False
    progress(f"{entry.id} {entry.version}: {Step.ACTIVATE}")
    registry = entry.registry if moves else built.registry
    try:
        write_record(built.changed(locked=entry, registry=registry))
    except OSError as error:
        what = f"{entry.id}: its record"
        raise unwritable(what, error, "check the disk space and permissions") from error
    return not is_complete


def _records(active: InstalledEnvironment, entry: LockedEnvironment) -> bool:
    """Return whether the record of the installation is complete, with the datasets of `entry`."""
    known = None if active.is_damaged else active.installation
    return known is not None and (known.locked is None or known.locked.datasets == entry.datasets)


def record_in_lock(path: Path, entry: LockedEnvironment, *, progress: Progress) -> None:
    """Write `entry` to the telescope.lock at `path`, unless it is there already."""
    if read_lock(path).find(entry.id) != entry:
        progress(f"{entry.id} {entry.version}: {Step.WRITE_LOCK}")
        try:
            change_lock(path, lambda lock: lock.merged([entry]))
        except OSError as error:
            advice = (
                f"{entry.id} is installed, but not locked: check the disk space and permissions, "
                "and install it again"
            )
            raise unwritable(str(path), error, advice) from error
    remember_project(path)


def locked_environment(
    registry: Registry, release: Release, lines: tuple[str, ...]
) -> LockedEnvironment:
    """Return the entry of `release` in telescope.lock, with the requirement `lines`."""
    return LockedEnvironment(
        id=release.id,
        version=release.version,
        wheel=release.wheel.filename,
        sha256=release.wheel.sha256,
        registry=address_of(registry),
        revision=registry.store.revision,
        protocol=f"{release.protocol.minimum}-{release.protocol.maximum}",
        python=python_version(),
        requirements=lines,
        requirements_sha256=digest_of(lines),
        datasets=tuple(
            LockedDataset(repo=data.repo, revision=data.revision) for data in release.datasets
        ),
    )


def address_of(registry: Registry) -> str:
    """Return the registry's address in a form that is valid from any working directory."""
    place = registry.address
    return place if "://" in place else parse_address(place).text


def find_active(environment_id: str) -> InstalledEnvironment | None:
    """Return the installed environment owner/name; None if it is not installed."""
    return next((one for one in installed_environments() if one.id == environment_id), None)


def fits_here(entry: LockedEnvironment, release: Release) -> bool:
    """Return whether `entry` locks `release` for this Python, with all requirements."""
    return (
        entry.sha256 == release.wheel.sha256
        and entry.python == python_version()
        and serve(entry.requirements, direct_needs(release.requires_dist))
    )
