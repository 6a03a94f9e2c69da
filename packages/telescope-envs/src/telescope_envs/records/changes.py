"""Compare two releases of an environment and list the changes for its users."""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET
from packaging.requirements import Requirement
from packaging.version import Version

from telescope_envs.records.release import Release

_SCORES = {"rewards", "reward range", "success threshold", "splits"}
"""Changes that make the scores of two releases differ even with the same model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two releases."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after}"


def changes_between(before: Release, after: Release) -> list[Change]:
    """Return the differences that matter to a user, in a fixed order.

    What one of the releases does not record is no difference.
    """
    old, new = _aspects(before), _aspects(after)
    return [
        Change(what=what, before=old[what], after=new[what])
        for what in old
        if what in new and old[what] != new[what]
    ]


def score_warnings(before: Release, after: Release) -> list[str]:
    """Return a warning for each change that would need a new major version but has none."""
    if is_major_step(before.version, after.version):
        return []
    return [
        f"{change}: scores of {before.version} and {after.version} are not comparable; indicate "
        "that with a major version (--bump major)"
        for change in changes_between(before, after)
        if change.what in _SCORES
    ]


def _aspects(release: Release) -> dict[str, str]:
    reward = release.reward
    weights = release.reward_weights
    parts = {} if weights is UNSET else weights
    listed = ", ".join(f"{name} {weight!r}" for name, weight in sorted(parts.items()))
    told = {} if weights is UNSET else {"rewards": listed or "no weighted sum"}
    return told | {
        "reward range": f"{reward.minimum:g} to {reward.maximum:g}",
        "success threshold": f"{reward.success:g}",
        "splits": _names(
            f"{name} {size or 'endless'}" for name, size in sorted(release.splits.items())
        ),
        "settings schema": release.config_schema_sha256[:12],
        "dependencies": _names(sorted(str(Requirement(text)) for text in release.requires_dist)),
        "python": release.requires_python,
        "datasets": _names(f"{d.repo}@{d.revision[:12]}" for d in release.datasets),
        "network": release.network,
        "secrets": _names(sorted(release.secrets)),
        "license": release.license,
    }


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def is_major_step(before: str, after: str) -> bool:
    """Return whether `after` is a new major version, whose scores do not compare with `before`."""
    old, new = Version(before), Version(after)
    return (new.epoch, new.major) > (old.epoch, old.major)
