"""Which newer release an installed environment can move to, and what differs in it.

A new major version means different tasks or rewards, so it is chosen only on request: scores from
before the update would not be comparable with scores after it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packaging.version import Version

from telescope_core.base.errors import RegistryError
from telescope_envs.records.release import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import notices, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What updating one environment would do."""

    before: Release
    after: Release | None
    """None if the environment stays as it is."""
    refused: str
    """A release that was not chosen, and why; empty if there is none."""
    warnings: tuple[str, ...]
    """What the registry says against the release that it is or becomes."""

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs besides the code, one line each."""
        return tuple(_changes(self.before, self.after)) if self.after is not None else ()


def plan_update(registry: Registry, before: Release, *, allow_major: bool) -> UpdatePlan:
    """Plan an update to the newest release that fits; `registry` is where `before` came from."""
    after, refused = _chosen(registry, before, allow_major=allow_major)
    version = (after or before).version
    return UpdatePlan(
        before=before,
        after=after,
        refused=refused,
        warnings=tuple(notices(registry, before.id, version)),
    )


def _chosen(
    registry: Registry, before: Release, *, allow_major: bool
) -> tuple[Release | None, str]:
    """Return the release to update to, and why another was not chosen."""
    newest = resolve(registry, before.id)
    if _major(newest) > _major(before) and not allow_major:
        return _newest_of_major(registry, before), (
            f"{newest.version} is a new major version, whose scores are not comparable "
            f"with those of {before.version}; to update to it, add --major"
        )
    if Version(newest.version) < Version(before.version):
        yanked = registry.status(before.id).yanked.get(before.version, "")
        why = f" and {before.version} is yanked: {yanked}" if yanked else ""
        return None, (
            f"{newest.version} is older{why}; to go back, run: telescope env install "
            f"{before.id}@{newest.version}"
        )
    return newest if Version(newest.version) > Version(before.version) else None, ""


def _newest_of_major(registry: Registry, before: Release) -> Release | None:
    wanted = f">{before.version},<{_major(before) + 1}"
    try:
        return resolve(registry, f"{before.id}@{wanted}")
    except RegistryError:  # no newer release of that major version runs here and is not yanked
        return None


def _major(release: Release) -> int:
    return Version(release.version).major


def _changes(before: Release, after: Release) -> Iterator[str]:
    old, new = before.reward, after.reward
    if (old.minimum, old.maximum) != (new.minimum, new.maximum):
        yield (f"reward: {old.minimum:g} to {old.maximum:g} -> {new.minimum:g} to {new.maximum:g}")
    if old.success != new.success:
        yield f"solved from: {old.success:g} -> {new.success:g}"
    if before.splits != after.splits:
        yield f"splits: {_splits(before)} -> {_splits(after)}"
    if before.network != after.network:
        yield f"network: {before.network} -> {after.network}"
    if set(before.secrets) != set(after.secrets):
        yield f"secrets: {_names(before.secrets)} -> {_names(after.secrets)}"
    if _data(before) != _data(after):
        yield f"data: {_data(before)} -> {_data(after)}"
    if before.config_schema_sha256 != after.config_schema_sha256:
        yield "settings: changed; see telescope env info"


def _splits(release: Release) -> str:
    return _names(f"{name} {size or 'endless'}" for name, size in sorted(release.splits.items()))


def _data(release: Release) -> str:
    return _names(f"{data.repo} at {data.revision}" for data in release.datasets)


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
