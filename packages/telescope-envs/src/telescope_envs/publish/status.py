"""Yank releases and deprecate environments.

Nothing is ever deleted: a yanked version still installs if it is named exactly or locked.
"""

from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from telescope_core.base.errors import ConfigError
from telescope_envs.records.catalog import newest_version
from telescope_envs.records.release import Deprecation, Status
from telescope_envs.registry.config import parse_address, read_user_config
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import parse_request, resolve_id
from telescope_envs.registry.stores import WritableStore
from telescope_envs.rules.admission import published_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """The new status record, and its effect for users."""

    id: str
    status: Status
    effect: str
    """One or two sentences."""


def yank(store: WritableStore, text: str, *, reason: str) -> StatusChange:
    """Yank `ID@VERSION`: it is no longer chosen, but still installs if named exactly."""
    registry = Registry(store)
    environment_id, wanted = _one_version(registry, text)
    version = _published_as(registry, environment_id, wanted)
    reason = _one_line(reason)

    def change(status: Status) -> Status:
        return status.changed(yanked={**status.yanked, version: reason})

    return _yanks_changed(store, environment_id, change)


def unyank(store: WritableStore, text: str) -> StatusChange:
    """Undo the yank of `ID@VERSION`, so that it can be chosen again."""
    registry = Registry(store)
    environment_id, wanted = _one_version(registry, text)

    def change(status: Status) -> Status:
        kept = {v: why for v, why in status.yanked.items() if Version(v) != wanted}
        if len(kept) == len(status.yanked):
            version = _published_as(registry, environment_id, wanted)
            known = ", ".join(status.yanked) or "none"
            raise ConfigError(f"{environment_id} {version} is not yanked; yanked versions: {known}")
        return status.changed(yanked=kept)

    return _yanks_changed(store, environment_id, change)


def deprecate(
    store: WritableStore, text: str, *, reason: str, replacement: str = ""
) -> StatusChange:
    """Mark the environment as deprecated, and optionally name a replacement."""
    registry = Registry(store)
    environment_id = _id_without_version(registry, text)
    if replacement:
        _require_same_registry(registry, replacement)
    instead = _id_without_version(registry, replacement) if replacement else ""
    if instead == environment_id:
        raise ConfigError(f"{environment_id} cannot replace itself; name another environment")
    deprecation = Deprecation(reason=_one_line(reason), replacement=instead)
    status = store.change_status(
        environment_id, lambda status: status.changed(deprecated=deprecation)
    )
    advice = f" and told to use {instead} instead" if instead else ""
    return StatusChange(
        id=environment_id,
        status=status,
        effect=f"It still installs; whoever installs, lists or describes it is warned{advice}.",
    )


def undeprecate(store: WritableStore, text: str) -> StatusChange:
    """Undo a deprecation."""
    environment_id = _id_without_version(Registry(store), text)

    def change(status: Status) -> Status:
        if status.deprecated is None:
            raise ConfigError(f"{environment_id} is not deprecated")
        return status.changed(deprecated=None)

    status = store.change_status(environment_id, change)
    return StatusChange(id=environment_id, status=status, effect="Users are no longer warned.")


def _one_version(registry: Registry, text: str) -> tuple[str, Version]:
    """Return the environment and the only version that `text` names."""
    request = parse_request(text)
    environment_id = resolve_id(registry, request)
    wanted = request.exact_version
    if wanted is None:
        versions = _versions(registry, environment_id)
        raise ConfigError(
            f"{text!r}: name one version exactly, such as {environment_id}@"
            f"{versions[-1] if versions else '0.1.0'}; published versions: "
            f"{', '.join(versions) or 'none'}"
        )
    return environment_id, wanted


def _published_as(registry: Registry, environment_id: str, wanted: Version) -> str:
    """Return how the version is spelled; a release that cannot be read can be yanked too."""
    versions = _versions(registry, environment_id)
    for version in versions:
        if Version(version) == wanted:
            return version
    known = ", ".join(versions) or "none"
    raise ConfigError(f"{environment_id} has no version {wanted}; published versions: {known}")


def _versions(registry: Registry, environment_id: str) -> list[str]:
    return sorted(published_versions(registry.store.read, environment_id), key=Version)


def _require_same_registry(registry: Registry, replacement: str) -> None:
    """Raise ConfigError if the replacement is named with the name of another registry."""
    named = parse_request(replacement).registry
    if named and named not in read_user_config().names_of(parse_address(registry.address)):
        raise ConfigError(
            f"--replacement {replacement!r} names the registry {named!r}, but what is deprecated "
            f"is in {registry.address}, which can only name its own environments; leave out "
            f"{named}: if the replacement is there as well"
        )


def _id_without_version(registry: Registry, text: str) -> str:
    request = parse_request(text)
    if request.wanted:
        raise ConfigError(
            f"{text!r}: a deprecation covers all versions; omit @{request.wanted}, or yank that "
            "version"
        )
    return resolve_id(registry, request)


def _yanks_changed(
    store: WritableStore, environment_id: str, change: Callable[[Status], Status]
) -> StatusChange:
    """Change the yanked versions, and say which version is chosen now."""
    status = store.change_status(environment_id, change)
    versions = [one.version for one in Registry(store).releases(environment_id)]
    newest = versions[newest_version(versions, status.yanked)] if versions else ""
    effect = (
        f"Users who name no version now get {newest}."
        if newest and newest not in status.yanked
        else "No version is chosen any more unless it is named exactly."
    )
    stays = "A yanked version still installs, with a warning, if it is named exactly or locked."
    return StatusChange(id=environment_id, status=status, effect=f"{effect} {stays}")


def _one_line(reason: str) -> str:
    reason = reason.strip()
    if not reason or not reason.isprintable() or len(reason) > 500:
        raise ConfigError("--reason must be one line of 1 to 500 printable characters")
    return reason
