"""Find the newer release to which an installed environment can move, and its differences.

A new major version means different tasks or rewards, so it is chosen only on request: scores from
before the update would not be comparable with scores after it.
"""

from dataclasses import dataclass

from packaging.version import Version

from telescope_core.base.errors import RegistryError
from telescope_envs.records.changes import changes_between, is_major_step
from telescope_envs.records.release import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import notices, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """Plan for updating one environment."""

    before: Release
    after: Release | None
    """None if the environment stays as it is."""
    refused: str
    """A release that was not chosen, with the reason; empty if there is none."""
    warnings: tuple[str, ...]
    """Warnings of the registry about the release that is chosen or kept."""

    @property
    def changes(self) -> tuple[str, ...]:
        """The differences besides the code, one line each."""
        return tuple(map(str, changes_between(self.before, self.after))) if self.after else ()


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
    """Return the release to update to, and the reason against another one."""
    newest = resolve(registry, before.id)
    if is_major_step(before.version, newest.version) and not allow_major:
        below = Version(before.version).major + 1
        try:
            newer = resolve(registry, f"{before.id}@>{before.version},<{below}")
        except RegistryError:  # no newer release of that major version runs here and is not yanked
            newer = None
        return newer, (
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
