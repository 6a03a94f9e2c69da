"""What a check of a registry finds: an invariant that does not hold, where, and what to do."""

from dataclasses import dataclass, field

CHECKS = {
    "config": "config.json is there and can be read",
    "layout": "every file is where a registry has files",
    "namespace": "every owner in the index has a namespace file that can be read and is its own",
    "index-line": "every line of the index is a release of the environment its file is named for",
    "version-once": "no version is published twice, however it is spelt",
    "published-at": "releases were published in the order of their lines, and not in the future",
    "requirement": "what a release needs comes from the package index, never from another address",
    "unique-name": "no two environments have the same distribution and module",
    "reserved-name": "no environment, bare name or owner has a reserved name",
    "alias": "every bare name means an environment of the index",
    "artifact": "wheels in the tree have the size and the digest of their release",
    "wheel": "wheels in the tree hold one environment, and what their release says",
    "status": "a status can be read and speaks of published versions",
    "schema": "schema/, where there is one, is what `telescope hub schemas` writes",
    "history": "index files only grew, in every commit and since",
    "alias-history": "no bare name was taken away or given to another environment",
}
"""Id of a check -> what it proves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """A key of `CHECKS`."""
    where: str
    """`path` or `path:line`, relative to the registry; with a commit where it is of the past."""
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
    """Keys of `CHECKS` that could not be made here."""
    notes: list[str] = field(default_factory=list[str])
    """Why, and what was checked in part only."""
