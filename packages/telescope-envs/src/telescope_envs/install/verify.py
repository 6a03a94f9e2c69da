"""`telescope env verify`: check an installed environment again, from files to registry.

The checks before an install are in `pipeline`, and the rules for the contents of a wheel in
`rules.wheel`.
"""

import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.utils import canonicalize_name

from telescope_core.base.errors import EnvironmentLoadError, TelescopeError, unknown_name
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_envs.install.data import cached_wheel, find_built
from telescope_envs.install.findings import (
    Compared,
    Finding,
    FindingKind,
    changed_byte_code,
    compared,
    extra_files,
    lock_findings,
    registry_findings,
    unreachable,
)
from telescope_envs.install.packages import installed_closure, packages_of, site_packages_of
from telescope_envs.locator import InstalledLocator, module_of, usable_names
from telescope_envs.processes.uv import Uv
from telescope_envs.records.installed import Installation, installed_environments
from telescope_envs.records.lockfile import find_lock, read_lock
from telescope_envs.records.reading import check_bytes
from telescope_envs.registry.lookup import open_registry
from telescope_envs.registry.registry import Registry
from telescope_envs.rules.wheel import hashes_in


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
        missing = Finding(kind=FindingKind.MISSING, what=name, text=str(error))
        return Verification(id=name, version="", place="", num_files=0, findings=(missing,))
    if location is None:
        raise unknown_name("installed environment", name, usable_names())
    if location.place is EnvironmentPlace.LINKED:
        note = Finding(
            kind=FindingKind.NOTE,
            what=location.registry,
            text="is linked: its files are meant to change, and are not compared",
        )
        return _verification(location, 0, (note,))
    packages = packages_of(location.interpreter)
    record = _record_of(location)
    if location.place is EnvironmentPlace.SHARED:
        packages = _only_needed(packages, location)
    parts = [compare(key, package) for key, package in packages.items()]
    recorded = [file for part in parts for file in part.recorded]
    findings = [finding for part in parts for finding in part.changed]
    if location.place is EnvironmentPlace.ISOLATED:
        venv = Path(location.interpreter).parents[1]
        with tempfile.TemporaryDirectory() as scratch:
            empty = Path(scratch) / "empty"
            Uv(offline=True).make_venv(empty, moves=True)  # as installing does
            findings += extra_files(venv, recorded, empty)
        for folder in site_packages_of(location.interpreter):
            findings += changed_byte_code(folder / module_of(location))
    if record is not None:
        findings += _against_its_sources(record, packages)
    return _verification(location, sum(bool(file.hash) for file in recorded), tuple(findings))


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
        yield from unreachable(record.registry, error)
    yield from _wheel_findings(record, registry, packages)


def _wheel_findings(
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
        yield Finding(
            kind=FindingKind.NOTE, what=release.wheel.filename, text=f"is not available: {error}"
        )
        return
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        published = hashes_in(wheel.read(path).decode())
    here = hashes_in(own.read_text("RECORD") or "")
    for name, digest in published.items():
        if digest and here.get(name) != digest:
            yield Finding(
                kind=FindingKind.CHANGED,
                what=str(own.locate_file(name)),
                text="has a different hash in RECORD than in the published wheel",
            )
    module = f"{release.module}/"
    for name in sorted(here.keys() - published.keys()):
        if name.startswith(module) and "__pycache__" not in name:
            yield Finding(
                kind=FindingKind.EXTRA,
                what=str(own.locate_file(name)),
                text="is in RECORD, but not in the published wheel",
            )
