"""Installing and removing environments: resolve, check, inspect, try, install, record.

Every check comes before the first change, so a bad wheel changes nothing.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from telescope_core.errors import unknown_name
from telescope_envs.installed import (
    Installation,
    InstalledEnvironment,
    installed_environments,
    remove_record,
    write_record,
)
from telescope_envs.packages import (
    install_requirements,
    install_wheel,
    missing_requirements,
    uninstall_distribution,
)
from telescope_envs.registry.describe import describe_wheel
from telescope_envs.registry.local import LocalRegistry
from telescope_envs.registry.records import Release
from telescope_envs.registry.resolve import matches, parse_request, resolve
from telescope_envs.registry.wheel import check_bytes, check_release, read_wheel


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallResult:
    """What `install` did."""

    release: Release
    is_new: bool
    """False: that release was installed already."""


def install(
    registry: LocalRegistry, text: str, *, progress: Callable[[str], None] = lambda step: None
) -> InstallResult:
    """Install the release that `text` asks for into this interpreter.

    `progress` is told each step. Raises RegistryError for a file that is not what was published,
    EnvironmentLoadError when it cannot be loaded here.
    """
    progress(f"looking up {text}")
    release = resolve(registry, text)
    if _is_installed(release):
        return InstallResult(release=release, is_new=False)
    progress(f"checking {release.wheel.filename}")
    data = registry.wheel_bytes(release)
    check_bytes(data, release)
    check_release(read_wheel(data, release.wheel.filename), release)
    missing = missing_requirements(release.requires_dist)
    if missing:
        progress(f"installing {', '.join(missing)}")
        install_requirements(missing, needed_by=release.id)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch) / release.wheel.filename
        wheel.write_bytes(data)
        progress(f"loading {release.id} {release.version}")
        describe_wheel(wheel, release.factory)
        progress(f"installing {release.id} {release.version}")
        install_wheel(wheel)
    write_record(
        Installation(
            registry=str(registry.root.resolve()), installed_at=datetime.now(UTC), release=release
        )
    )
    return InstallResult(release=release, is_new=True)


def uninstall(text: str) -> InstalledEnvironment:
    """Remove an installed environment; its dependencies stay. Returns what was removed."""
    found = find_installed(text)
    if found is None:
        known = [environment.id for environment in installed_environments()]
        raise unknown_name("installed environment", text, known)
    uninstall_distribution(found.distribution)
    if found.installation is not None:
        remove_record(found.installation.release)
    return found


def find_installed(text: str) -> InstalledEnvironment | None:
    """Return the installed environment that `text` names; None when there is none that fits.

    A bare name that several owners use names none of them.
    """
    request = parse_request(text)
    fitting = [
        environment
        for environment in installed_environments()
        if request.typed_id in (environment.id, environment.name)
        and matches(environment.version, request.wanted)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _is_installed(release: Release) -> bool:
    found = find_installed(release.id)
    recorded = found.installation if found is not None else None
    return recorded is not None and recorded.release.wheel.sha256 == release.wheel.sha256
