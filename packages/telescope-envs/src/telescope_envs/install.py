"""Installing and removing environments: resolve, check, inspect, try, install, record.

Every check comes before the first change, so a bad wheel changes nothing.
"""

import sys
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
from telescope_envs.registry.records import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolve import matches, parse_request, resolve
from telescope_envs.registry.wheel import check_bytes, check_release, read_wheel
from telescope_envs.venv import build_venv, remove_venv, venv_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallResult:
    """What `install` did."""

    release: Release
    is_new: bool
    """False: that release was installed already."""


def install(
    registry: Registry,
    text: str,
    *,
    isolated: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> InstallResult:
    """Install the release that `text` asks for into this interpreter.

    With `isolated` it goes into a virtual environment of its own instead. `progress` is told each
    step. Raises RegistryError for a file that is not what was published, EnvironmentLoadError when
    it cannot be loaded.
    """
    progress(f"looking up {text}")
    release = resolve(registry, text)
    if _is_installed(release, isolated=isolated):
        return InstallResult(release=release, is_new=False)
    progress(f"checking {release.wheel.filename}")
    data = registry.wheel_bytes(release)
    check_bytes(data, release)
    check_release(read_wheel(data, release.wheel.filename), release)
    before = find_installed(release.id)
    interpreter = ""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch) / release.wheel.filename
        wheel.write_bytes(data)
        if isolated:
            progress(f"building a virtual environment for {release.id} {release.version}")
            interpreter = str(build_venv(release, wheel, venv_folder(release)))
        else:
            _install_here(release, wheel, progress)
    write_record(
        Installation(
            registry=registry.address,
            installed_at=datetime.now(UTC),
            release=release,
            interpreter=interpreter,
        )
    )
    if before is not None:
        _remove_files(before, unless=interpreter or sys.executable)
    return InstallResult(release=release, is_new=True)


def _install_here(release: Release, wheel: Path, progress: Callable[[str], None]) -> None:
    missing = missing_requirements(release.requires_dist)
    if missing:
        progress(f"installing {', '.join(missing)}")
        install_requirements(missing, needed_by=release.id)
    progress(f"loading {release.id} {release.version}")
    describe_wheel(wheel, release.factory)
    progress(f"installing {release.id} {release.version}")
    install_wheel(wheel)


def _remove_files(found: InstalledEnvironment, *, unless: str = "") -> None:
    """Remove what `found` is made of, where it is not in the interpreter `unless`."""
    if found.interpreter == unless:
        return
    if found.interpreter == sys.executable:
        uninstall_distribution(found.distribution)
    else:
        remove_venv(found.interpreter)


def uninstall(text: str) -> InstalledEnvironment:
    """Remove an installed environment; its dependencies stay. Returns what was removed."""
    found = find_installed(text)
    if found is None:
        known = [environment.id for environment in installed_environments()]
        raise unknown_name("installed environment", text, known)
    _remove_files(found)
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


def _is_installed(release: Release, *, isolated: bool) -> bool:
    found = find_installed(release.id)
    recorded = found.installation if found is not None else None
    return (
        recorded is not None
        and recorded.release.wheel.sha256 == release.wheel.sha256
        and bool(recorded.interpreter) == isolated
    )
