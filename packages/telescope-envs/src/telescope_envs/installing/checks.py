"""Checks that refuse a release before anything is downloaded."""

from packaging.version import Version

from telescope_core.errors import RegistryError
from telescope_envs.installed import InstalledEnvironment
from telescope_envs.lockfile import LockedEnvironment
from telescope_envs.registry.records import Release, Status
from telescope_envs.registry.resolving import Request


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
    if is_exact(request):
        return
    in_use = {"installed": installed.version if installed is not None else ""}
    in_use["in telescope.lock"] = entry.version if entry is not None else ""
    for where, version in in_use.items():
        if version and Version(version) > Version(release.version):
            reason = status.yanked.get(version)
            why = f" ({version} is yanked: {reason})" if reason is not None else ""
            raise RegistryError(
                f"{release.id} {version} is {where}, but the registry offers {release.version} as "
                f"the newest{why}; to go back, type it exactly: {release.id}@{release.version}"
            )


def check_same_bytes(release: Release, entry: LockedEnvironment | None) -> None:
    """Raise RegistryError if the wheel of the locked version has changed."""
    if entry is None or entry.version != release.version:
        return
    if entry.sha256 != release.wheel.sha256:
        raise RegistryError(
            f"{release.id} {release.version} is locked with wheel sha256 {entry.sha256}, but the "
            f"registry now has {release.wheel.sha256}; releases are never replaced: tell the "
            "registry's owner, and do not install it"
        )


def is_exact(request: Request) -> bool:
    """Whether one exact version or hash was requested."""
    if request.wanted.startswith("sha256:"):
        return True
    try:
        Version(request.wanted.removeprefix("=="))
    except ValueError:
        return False
    return True
