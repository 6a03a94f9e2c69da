"""Findings of `env verify`: changed files, packages unlike the lock, news of the registry.

A RECORD lists a package's files with their hashes. A file that no RECORD lists must be one that an
empty virtual environment has, or byte code of a listed file. Anything else was added later.
"""

import base64
import hashlib
import marshal
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import Distribution
from importlib.util import MAGIC_NUMBER, source_from_cache
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from telescope_core.base.errors import TelescopeError
from telescope_envs.install.packages import CORE, locked_versions
from telescope_envs.records.files import files_below
from telescope_envs.records.installed import Installation
from telescope_envs.records.lockfile import LockedEnvironment
from telescope_envs.registry.registry import Registry
from telescope_envs.rules.wheel import hashes_in


class FindingKind(StrEnum):
    """Kinds of findings; all except NOTE make the verification fail."""

    CHANGED = "changed"
    """A file differs from the installed one."""
    MISSING = "missing"
    """A file or a package is gone."""
    EXTRA = "extra"
    """A file exists that no package installed."""
    LOCK = "lock"
    """Installed packages differ from locked ones."""
    REGISTRY = "registry"
    """The registry has another wheel under that version, or none."""
    YANKED = "yanked"
    """The version was yanked, or there is an advisory about the environment."""
    NOTE = "note"
    """Worth knowing, but not a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding."""

    kind: FindingKind
    what: str
    """The file, package or version."""
    text: str
    """Its fault and advice, as the predicate of a sentence about `what`."""

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
    """Yield findings of the registry about the installed release."""
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


_BYTE_CODE_HEADER = 16
_NOT_OF_PACKAGES = {"telescope.json", ".lock"}
"""Files beside the packages: the record of the installation, and uv's lock file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a RECORD."""

    package: str
    path: Path
    """Absolute, without `..`; symbolic links are not followed."""
    hash: str
    """`sha256=...`; empty for RECORD itself and for byte code."""


class Compared(NamedTuple):
    """One package, compared with its RECORD."""

    recorded: tuple[Recorded, ...]
    changed: tuple[Finding, ...]


def compared(name: str, package: Distribution) -> Compared:
    """Compare every file of a package, whose canonical name is `name`, with its RECORD."""
    recorded = tuple(
        Recorded(
            package=name,
            path=Path(os.path.normpath(str(package.locate_file(listed)))),
            hash=digest,
        )
        for listed, digest in hashes_in(package.read_text("RECORD") or "").items()
        if listed
    )
    return Compared(recorded, tuple(_changed_files(recorded)))


def _changed_files(recorded: Iterable[Recorded]) -> Iterator[Finding]:
    """Yield files that are missing or differ from their RECORD."""
    for file in recorded:
        if not file.path.is_file():
            if file.hash:
                yield Finding(
                    kind=FindingKind.MISSING,
                    what=str(file.path),
                    text=f"is gone; {file.package} was installed with it",
                )
        elif file.hash and _hash(file.path, file.hash) != file.hash:
            yield Finding(
                kind=FindingKind.CHANGED,
                what=str(file.path),
                text=f"is not the file that was installed with {file.package}",
            )


def extra_files(venv: Path, recorded: list[Recorded], empty: Path) -> Iterator[Finding]:
    """Yield the files below `venv` that no package installed.

    `empty` is a virtual environment without packages; files that are the same in it belong there.
    """
    listed = {file.path for file in recorded}
    for path in files_below(venv):
        if path in listed or (path.parent == venv and path.name in _NOT_OF_PACKAGES):
            continue
        if "__pycache__" in path.parts and path.suffix == ".pyc":
            source = _source_of(path)
            if source in listed:
                continue
            text = "is byte code of a file that no package installed"
        elif _is_same(path, empty / path.relative_to(venv)):
            continue
        elif path.suffix == ".pth":
            text = "runs code at each start of Python, and no package installed it"
        else:
            text = "belongs to no installed package"
        yield Finding(kind=FindingKind.EXTRA, what=str(path), text=text)


def changed_byte_code(folder: Path) -> Iterator[Finding]:
    """Yield the byte code below `folder` that differs from what its source compiles to.

    Python runs byte code instead of the source, so changing it has the same effect as changing
    the source.
    """
    for path in files_below(folder):
        if path.suffix != ".pyc":
            continue
        if not path.is_file():
            yield Finding(
                kind=FindingKind.CHANGED, what=str(path), text="is no plain file; remove it"
            )
            continue
        source = _source_of(path)
        if source is None or not source.is_file():
            continue
        data = path.read_bytes()
        if data[:4] != MAGIC_NUMBER:
            continue  # from another version of Python, which this one does not run
        code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=0)
        if code != _loaded(data):
            yield Finding(
                kind=FindingKind.CHANGED,
                what=str(path),
                text=f"is not the byte code of {source.name}; remove it",
            )


def _loaded(data: bytes) -> object:
    try:
        return marshal.loads(data[_BYTE_CODE_HEADER:])
    except (EOFError, ValueError, TypeError):
        return None


def _source_of(path: Path) -> Path | None:
    try:
        return Path(source_from_cache(str(path)))
    except ValueError:
        return None


def _is_same(path: Path, ours: Path) -> bool:
    if ours.is_symlink() or path.is_symlink():
        return ours.is_symlink() and path.is_symlink() and os.readlink(ours) == os.readlink(path)
    if not (ours.is_file() and path.is_file()):
        return False
    # pyvenv.cfg may differ: it holds the folder's name and the version of uv.
    is_own_word = path.name == "pyvenv.cfg"
    return is_own_word or path.read_bytes() == ours.read_bytes()


def _hash(path: Path, like: str) -> str:
    kind = like.partition("=")[0]
    digest = hashlib.new(kind, path.read_bytes()).digest()
    return f"{kind}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
