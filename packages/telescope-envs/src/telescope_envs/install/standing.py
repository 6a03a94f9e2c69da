"""What `env verify` finds when it compares an installation with its lock and its registry."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import Distribution

from packaging.utils import canonicalize_name

from telescope_core.errors import TelescopeError
from telescope_envs.install.packages import CORE, locked_versions
from telescope_envs.records.installed import Installation
from telescope_envs.records.lockfile import LockedEnvironment
from telescope_envs.registry.registry import Registry


class FindingKind(StrEnum):
    """What was found; all but NOTE make the verification fail."""

    CHANGED = "changed"
    """A file is not the one that was installed."""
    MISSING = "missing"
    """A file or a package is gone."""
    EXTRA = "extra"
    """A file is there that no package installed."""
    LOCK = "lock"
    """What is installed differs from what is locked."""
    REGISTRY = "registry"
    """The registry has another wheel under that version, or none."""
    YANKED = "yanked"
    """The version was yanked, or there is an advisory about the environment."""
    NOTE = "note"
    """Worth knowing, but not a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: FindingKind
    what: str
    """The file, package or version."""
    text: str
    """What is wrong with it and what to do, as the predicate of a sentence about `what`."""

    @property
    def is_problem(self) -> bool:
        """Whether it makes the verification fail."""
        return self.kind is not FindingKind.NOTE


def lock_findings(
    record: Installation, locked: LockedEnvironment, packages: Mapping[str, Distribution]
) -> Iterator[Finding]:
    """Yield the packages of a virtual environment that differ from its lock."""
    own = str(canonicalize_name(record.release.distribution))
    wanted = dict(line.split("==", 1) for line in locked_versions(locked.requirements))
    wanted = {str(canonicalize_name(name)): version for name, version in wanted.items()}
    here = {name: package.version for name, package in packages.items() if name != CORE}
    for name in sorted({*wanted, own, *here}):
        expected = record.release.version if name == own else wanted.get(name, "")
        got = here.get(name, "")
        if expected != got:
            yield Finding(
                kind=FindingKind.LOCK,
                what=name,
                text=f"{expected or 'nothing'} is locked, {got or 'nothing'} is installed",
            )


def registry_findings(registry: Registry, record: Installation) -> Iterator[Finding]:
    """Yield what the registry now has to report about the installed release."""
    release = record.release
    label = f"{release.id} {release.version}"
    published = {one.version: one for one in registry.releases(release.id)}
    now = published.get(release.version)
    if now is None:
        yield Finding(
            kind=FindingKind.REGISTRY,
            what=label,
            text=f"is not in {registry.address} any more, although releases are never removed",
        )
    elif now.wheel.sha256 != release.wheel.sha256:
        yield Finding(
            kind=FindingKind.REGISTRY,
            what=label,
            text=f"has a wheel with sha256 {release.wheel.sha256}, but {registry.address} has "
            f"{now.wheel.sha256}; releases never change: tell the registry's owner",
        )
    status = registry.status(release.id)
    if release.version in status.yanked:
        why = status.yanked[release.version]
        yield Finding(kind=FindingKind.YANKED, what=label, text=f"is yanked: {why}")
    for advisory in status.advisories:
        yield Finding(kind=FindingKind.YANKED, what=release.id, text=f"advisory: {advisory}")
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        yield Finding(
            kind=FindingKind.NOTE,
            what=release.id,
            text=f"is deprecated: {status.deprecated.reason}{instead}",
        )


def unreachable(registry: str, error: TelescopeError) -> Iterable[Finding]:
    """Return a note that a registry could not be reached."""
    text = f"could not be reached, so yanks and advisories are not known: {error}"
    return [Finding(kind=FindingKind.NOTE, what=registry, text=text)]
