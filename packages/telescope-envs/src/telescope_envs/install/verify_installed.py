"""`telescope env verify`: check an installed environment again, from files to registry.

The checks before an install are in `pipeline`, and the rules for the contents of a wheel in
`rules.wheel`. A RECORD lists a package's files with their hashes. A file that no RECORD lists must
be one that an empty virtual environment has, or byte code of a listed file. Anything else was added
later.
"""

import io
import marshal
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import Distribution
from importlib.util import MAGIC_NUMBER, source_from_cache
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from telescope_core.base.errors import EnvironmentLoadError, TelescopeError, unknown_name
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_envs.install.data import cached_wheel, find_built
from telescope_envs.install.packages import (
    CORE,
    installed_closure,
    locked_versions,
    packages_of,
    site_packages_of,
)
from telescope_envs.locator import InstalledLocator, module_of, usable_names
from telescope_envs.processes.uv import Uv
from telescope_envs.records.files import files_below
from telescope_envs.records.installed import Installation, installed_environments
from telescope_envs.records.lockfile import LockedEnvironment, find_lock, read_lock
from telescope_envs.records.reading import check_bytes
from telescope_envs.registry.lookup import open_registry
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import removals
from telescope_envs.rules.wheel import INSTALLERS_FILES, hashes_in, record_hash


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
    """The registry has another wheel under that version, or none, or installs it no longer."""
    YANKED = "yanked"
    """The version was yanked, or there is an advisory about the environment."""
    NOTE = "note"
    """Worth knowing, but not a problem."""


@dataclass(frozen=True, slots=True)
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
            text = f"{expected or 'nothing'} is locked, {got or 'nothing'} is installed"
            yield Finding(FindingKind.LOCK, name, text)


def registry_findings(registry: Registry, record: Installation) -> Iterator[Finding]:
    """Yield findings of the registry about the installed release."""
    release = record.release
    label = f"{release.id} {release.version}"
    published = {one.version: one for one in registry.releases(release.id)}
    now = published.get(release.version)
    if now is None and (removed := removals(registry, release.id, release.version)):
        finding = removed[0].removeprefix(f"{label} ")
        yield Finding(FindingKind.REGISTRY, label, f"{finding} ({registry.address})")
    elif now is None:
        text = f"is not in {registry.address} any more, although releases are never removed"
        yield Finding(FindingKind.REGISTRY, label, text)
    elif now.wheel.sha256 != release.wheel.sha256:
        text = (
            f"has a wheel with sha256 {release.wheel.sha256}, but {registry.address} has "
            f"{now.wheel.sha256}; releases never change: tell the registry's owner"
        )
        yield Finding(FindingKind.REGISTRY, label, text)
    owner = registry.namespace(release.owner)
    if owner is None or owner.is_withheld:
        why = "is withheld, because its owner is suspended" if owner else "has no owner any more"
        text = f"{why}: nobody can install it from {registry.address}"
        yield Finding(FindingKind.REGISTRY, release.id, text)
    elif owner.status == "suspended":
        text = "is of an owner who is suspended, and publishes nothing new"
        yield Finding(FindingKind.NOTE, release.id, text)
    status = registry.status(release.id)
    if release.version in status.yanked:
        text = f"is yanked: {status.yanked[release.version]}"
        yield Finding(FindingKind.YANKED, label, text)
    for advisory in status.advisories:
        yield Finding(FindingKind.YANKED, release.id, f"advisory: {advisory}")
    if status.deprecated is not None:
        instead = f"; use {status.deprecated.replacement}" if status.deprecated.replacement else ""
        text = f"is deprecated: {status.deprecated.reason}{instead}"
        yield Finding(FindingKind.NOTE, release.id, text)


def unreachable(registry: str, error: TelescopeError) -> Finding:
    """Return a note that a registry could not be reached."""
    text = f"could not be reached, so yanks and advisories are not known: {error}"
    return Finding(FindingKind.NOTE, registry, text)


_BYTE_CODE_HEADER = 16
_NOT_OF_PACKAGES = {"telescope.json", ".lock"}
"""Files beside the packages: the record of the installation, and uv's lock file."""


class Compared(NamedTuple):
    """One package, compared with its RECORD."""

    recorded: dict[Path, str]
    """Path of each file, absolute and without `..`, where links are not followed -> `sha256=...`;
    empty for RECORD itself and for byte code."""
    changed: tuple[Finding, ...]
    """Files that are missing or differ."""


def compared(name: str, package: Distribution) -> Compared:
    """Compare every file of a package, whose canonical name is `name`, with its RECORD."""
    recorded = {
        Path(os.path.normpath(str(package.locate_file(listed)))): digest
        for listed, digest in hashes_in(package.read_text("RECORD") or "").items()
        if listed
    }
    changed: list[Finding] = []
    for path, digest in recorded.items():
        if digest and not path.is_file():
            text = f"is gone; {name} was installed with it"
            changed.append(Finding(FindingKind.MISSING, str(path), text))
        elif digest and record_hash(path.read_bytes(), digest.partition("=")[0]) != digest:
            text = f"is not the file that was installed with {name}"
            changed.append(Finding(FindingKind.CHANGED, str(path), text))
    return Compared(recorded, tuple(changed))


def extra_files(venv: Path, recorded: Iterable[Path], empty: Path) -> Iterator[Finding]:
    """Yield the files below `venv` that no package installed, other than those `recorded`.

    `empty` is a virtual environment without packages; files that are the same in it belong there.
    """
    listed = set(recorded)
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
        yield Finding(FindingKind.EXTRA, str(path), text)


def changed_byte_code(folder: Path) -> Iterator[Finding]:
    """Yield the byte code below `folder` that differs from what its source compiles to.

    Python runs byte code instead of the source, so changing it has the same effect as changing
    the source.
    """
    for path in files_below(folder):
        if path.suffix != ".pyc":
            continue
        if not path.is_file():
            yield Finding(FindingKind.CHANGED, str(path), "is no plain file; remove it")
            continue
        source = _source_of(path)
        if source is None or not source.is_file():
            continue
        data = path.read_bytes()
        if data[:4] != MAGIC_NUMBER:
            continue  # from another version of Python, which this one does not run
        code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True, optimize=0)
        if code != _loaded(data):
            text = f"is not the byte code of {source.name}; remove it"
            yield Finding(FindingKind.CHANGED, str(path), text)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of checking one environment again."""

    id: str
    version: str
    place: str
    num_files: int
    """Number of files whose hashes were compared."""
    findings: tuple[Finding, ...]

    @property
    def is_whole(self) -> bool:
        """Whether no problem was found."""
        return not any(finding.is_problem for finding in self.findings)


Packages = Callable[[str], Mapping[str, Distribution]]
"""Returns the installed packages of an interpreter, by canonical name."""


Compare = Callable[[str, Distribution], Compared]


def verify(
    name: str, *, packages_of: Packages = packages_of, compare: Compare = compared
) -> Verification:
    """Check the environment `name` again; UnknownNameError if it is not here.

    A caller that checks several gives a `packages_of` that reads each interpreter's once, and a
    `compare` that compares each package once: environments of one Python share most of them.
    """
    try:
        location = InstalledLocator().locate(name)
    except EnvironmentLoadError as error:
        missing = Finding(FindingKind.MISSING, name, str(error))
        return Verification(id=name, version="", place="", num_files=0, findings=(missing,))
    if location is None:
        raise unknown_name("installed environment", name, usable_names())
    if location.place is EnvironmentPlace.LINKED:
        text = "is linked: its files are meant to change, and are not compared"
        note = Finding(FindingKind.NOTE, location.registry, text)
        return _verification(location, 0, (note,))
    packages = packages_of(location.interpreter)
    record = _record_of(location)
    if location.place is EnvironmentPlace.SHARED:
        packages = _only_needed(packages, location)
    parts = [compare(key, package) for key, package in packages.items()]
    recorded = [one for part in parts for one in part.recorded.items()]
    findings = [finding for part in parts for finding in part.changed]
    if location.place is EnvironmentPlace.ISOLATED:
        venv = Path(location.interpreter).parents[1]
        with tempfile.TemporaryDirectory() as scratch:
            empty = Path(scratch) / "empty"
            Uv(offline=True).make_venv(empty, moves=True)  # as installing does
            findings += extra_files(venv, (path for path, _ in recorded), empty)
        for folder in site_packages_of(location.interpreter):
            findings += changed_byte_code(folder / module_of(location))
    if record is not None:
        findings += _against_its_sources(record, packages)
    return _verification(location, sum(bool(digest) for _, digest in recorded), tuple(findings))


def _verification(
    location: EnvironmentLocation, num_files: int, findings: tuple[Finding, ...]
) -> Verification:
    return Verification(
        id=location.id,
        version=location.version,
        place=location.place.value,
        num_files=num_files,
        findings=findings,
    )


def _record_of(location: EnvironmentLocation) -> Installation | None:
    """Return the record of the installation at `location`."""
    path = find_lock()
    locked = read_lock(path).find(location.id) if path is not None else None
    if locked is not None:
        return find_built(locked)
    found = (one for one in installed_environments() if one.id == location.id)
    return next((one.installation for one in found), None)


def _only_needed(
    packages: Mapping[str, Distribution], location: EnvironmentLocation
) -> dict[str, Distribution]:
    """Return the environment's own package and its dependencies among `packages`."""
    own = module_of(location).replace("_", "-")
    package = packages.get(own)
    needed = installed_closure(package.requires or []) if package is not None else ()
    names = {own, *(line.partition("==")[0] for line in needed)}
    return {name: found for name, found in packages.items() if name in names}


def _against_its_sources(
    record: Installation, packages: Mapping[str, Distribution]
) -> Iterator[Finding]:
    if record.locked is not None:
        yield from lock_findings(record, record.locked, packages)
    try:
        registry = open_registry(record.registry)
        yield from registry_findings(registry, record)
    except TelescopeError as error:
        registry = None
        yield unreachable(record.registry, error)
    yield from wheel_findings(record, registry, packages)


def wheel_findings(
    record: Installation, registry: Registry | None, packages: Mapping[str, Distribution]
) -> Iterator[Finding]:
    """Yield the environment's files whose recorded hashes differ from those in its wheel.

    Whoever changes a file can also change its line in RECORD, but not the hash of the wheel.
    """
    release = record.release
    own = packages.get(str(canonicalize_name(release.distribution)))
    if own is None:
        return
    try:
        cached = cached_wheel(release)
        if cached is not None:
            data = cached.read_bytes()
        else:
            data = (registry or open_registry(record.registry)).wheel_bytes(release)
            check_bytes(data, release)
    except TelescopeError as error:
        yield Finding(FindingKind.NOTE, release.wheel.filename, f"is not available: {error}")
        return
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        published = hashes_in(wheel.read(path).decode())
    here = hashes_in(own.read_text("RECORD") or "")
    replaced = {path.replace("RECORD", one) for one in INSTALLERS_FILES}  # some old wheels hold one
    for name, digest in published.items():
        if digest and here.get(name) != digest and name not in replaced:
            text = "has a different hash in RECORD than in the published wheel"
            yield Finding(FindingKind.CHANGED, str(own.locate_file(name)), text)
    module = f"{release.module}/"
    for name in sorted(here.keys() - published.keys()):
        if name.startswith(module) and "__pycache__" not in name:
            text = "is in RECORD, but not in the published wheel"
            yield Finding(FindingKind.EXTRA, str(own.locate_file(name)), text)
