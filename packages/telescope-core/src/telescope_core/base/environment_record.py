"""`EnvironmentRecord`: the exact code of the environment that a run or an eval used.

Two records with the same `lock_digest` ran the same wheel with the same packages and Python. Code
that this Python imports from a folder is identified by the digests of its files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from telescope_core.base.code_files import code_files, digest_of_files, file_changes
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentPlace

_SHORT = 12
_PLACES = {
    EnvironmentPlace.IMPORTABLE: "imported as it is",
    EnvironmentPlace.LINKED: "linked to its project",
    EnvironmentPlace.SHARED: "in this Python",
    EnvironmentPlace.ISOLATED: "in a virtual environment of its own",
    EnvironmentPlace.ELSEWHERE: "played by workers elsewhere",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRecord:
    """One environment as it was when a run began; an empty string means "not known"."""

    id: str
    """owner/name, or `module:Class`."""
    version: str
    place: EnvironmentPlace
    registry: str = ""
    wheel_sha256: str = ""
    lock_digest: str = ""
    dependencies: tuple[str, ...] = ()
    """`name==version` of each package that is installed with it."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Each file that its code consists of, and each that its settings name -> digest of its
    content, see `code_files`; empty where there are none, or in records of earlier versions."""

    @property
    def digest(self) -> str:
        """Digest that identifies its code: of the lock, or else of its files; empty = not known."""
        return self.lock_digest or digest_of_files(self.files)

    @property
    def about(self) -> str:
        """Its id, version and place in words, for a plan."""
        parts = [f"{self.id} {self.version}".rstrip(), _PLACES[self.place]]
        if self.digest:
            parts.append(f"digest {self.digest[:_SHORT]}")
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """The identity of the environment on one line."""
        digest = f", digest {self.digest[:_SHORT]}" if self.digest else ""
        return f"{self.id} {self.version} ({self.place}{digest})"


def record_of(
    location: EnvironmentLocation, settings: Mapping[str, Any] | None = None
) -> EnvironmentRecord:
    """Return the record of the environment at `location`, which reads its files.

    `settings`: those of the environment that were given.
    """
    return EnvironmentRecord(
        id=location.id,
        version=location.version,
        place=location.place,
        registry=location.registry,
        wheel_sha256=location.wheel_sha256,
        lock_digest=location.lock_digest,
        dependencies=location.dependencies,
        files=code_files(location, settings or {}),
    )


def elsewhere(name: str) -> EnvironmentRecord:
    """Return the record of an environment that is played by workers started elsewhere."""
    return EnvironmentRecord(id=name, version="", place=EnvironmentPlace.ELSEWHERE)


def changes(before: EnvironmentRecord, after: EnvironmentRecord) -> list[str]:
    """Return one line for each difference; no lines if both run the same code.

    Apart from id and version, a field is compared only when both records know it. One wheel is the
    same code from whichever registry.
    """
    files = file_changes(before.files, after.files)
    if before.lock_digest and before.lock_digest == after.lock_digest:
        return files
    found: list[str] = []
    if before.id != after.id:
        found.append(f"environment: {before.id} -> {after.id}")
    if before.version != after.version:
        found.append(f"version: {before.version} -> {after.version}")
    is_same_wheel = bool(before.wheel_sha256) and before.wheel_sha256 == after.wheel_sha256
    if not is_same_wheel and _both_differ(before.registry, after.registry):
        found.append(f"registry: {before.registry} -> {after.registry}")
    if _both_differ(before.wheel_sha256, after.wheel_sha256):
        found.append(f"sha256: {_short(before.wheel_sha256)} -> {_short(after.wheel_sha256)}")
    found += _dependency_changes(before.dependencies, after.dependencies)
    # In another release, which its version shows, everything may differ.
    if before.version == after.version:
        found += files
    if not found and _both_differ(before.lock_digest, after.lock_digest):
        found.append(f"digest: {_short(before.lock_digest)} -> {_short(after.lock_digest)}")
    if not found and bool(before.lock_digest) != bool(after.lock_digest):
        if before.place != after.place:
            found.append(f"place: {before.place} -> {after.place}")
        else:
            found.append(f"digest: {_short(before.lock_digest)} -> {_short(after.lock_digest)}")
    return found


def all_changes(
    before: Mapping[str, EnvironmentRecord], after: Mapping[str, EnvironmentRecord]
) -> list[str]:
    """Return the differences of the environments in both mappings, one line each, by name."""
    return [
        f"{name}: {line}"
        for name in before
        if name in after
        for line in changes(before[name], after[name])
    ]


def _both_differ(before: str, after: str) -> bool:
    return bool(before and after and before != after)


def _short(digest: str) -> str:
    return digest[:_SHORT] or "none"


def _dependency_changes(before: Iterable[str], after: Iterable[str]) -> list[str]:
    old, new = _versions(before), _versions(after)
    if not old or not new:
        return []
    return [
        f"dependency {name}: {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _versions(dependencies: Iterable[str]) -> dict[str, str]:
    return {name: version for name, _, version in (d.partition("==") for d in dependencies)}
