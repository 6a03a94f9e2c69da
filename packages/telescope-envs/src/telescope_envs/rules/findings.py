"""Findings of a registry check: the invariant that does not hold, where, and how to fix it."""

from dataclasses import dataclass, field

CHECKS = {
    "config": "config.json exists and can be read",
    "layout": "every file has a path that the registry format allows",
    "namespace": "every owner in the index has a readable namespace file that names that owner",
    "index-line": "every line of the index is a release of the environment its file is named for",
    "version-once": "no version is published twice, however it is spelled",
    "published-at": "releases were published in the order of their lines, and not in the future",
    "requirement": "requirements of a release come from the package index, never from a URL",
    "unique-name": "no two environments have the same distribution and module",
    "reserved-name": "no environment, bare name or owner has a reserved name",
    "alias": "every bare name points to an environment in the index",
    "artifact": "wheels in the tree have the size and digest that their release records",
    "wheel": "wheels in the tree hold one environment and match their release",
    "removed": "removed.toml, if it exists, names releases with reasons whose wheels are gone",
    "status": "every status file can be read and names only published versions",
    "schema": "schema/, if it exists, is what `telescope hub schemas` writes",
    "history": "index files only grew, in every commit and in the working tree",
    "alias-history": "no bare name was removed or given to another environment",
}
"""Id of a check -> the invariant that it checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """A key of `CHECKS`."""
    where: str
    """`path` or `path:line`, relative to the registry; names the commit for a past change."""
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The outcome of a check of a registry."""

    registry: str
    num_environments: int
    num_releases: int
    num_commits: int
    """Commits that changed the index or the bare names."""
    findings: list[Finding]
    unchecked: list[str] = field(default_factory=list[str])
    """Keys of `CHECKS` that could not run here."""
    notes: list[str] = field(default_factory=list[str])
    """Why checks could not run, and which ran only in part."""
