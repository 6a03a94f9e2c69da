"""`InstalledLocator`: find the code on this machine for the name of an environment.

It looks in this order: environments linked for development, exactly what the nearest telescope.lock
names, installed environments, packages with the entry point. It never returns a different
environment than the one named: versions, owners and registries are compared, and a bare name that
two owners use is an error.
"""

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from telescope_core.base.errors import ConfigError, EnvironmentLoadError, TelescopeError
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_core.finding.code_names import names_folder
from telescope_core.finding.schemes import adapted
from telescope_envs.install.adapted import locate_adapted
from telescope_envs.install.data import find_built, kept_datasets
from telescope_envs.install.packages import installed_closure, locked_versions, packages_of
from telescope_envs.install.requirements import python_version
from telescope_envs.records.files import sha256_of
from telescope_envs.records.installed import (
    Installation,
    InstalledEnvironment,
    installed_environments,
)
from telescope_envs.records.links import Link, adapted_links, links
from telescope_envs.records.lockfile import LockedEnvironment, find_lock, read_lock
from telescope_envs.records.projects import LinkedProject, read_project
from telescope_envs.registry.config import read_user_config
from telescope_envs.registry.lookup import locate_release, open_registry
from telescope_envs.registry.resolving import Request, matches, parse_request


class InstalledLocator:
    """Locates linked and installed environments, and packages with the entry point."""

    def locate(self, name: str) -> EnvironmentLocation | None:
        """Return the location of `name`, `owner/name` or `owner/name@version`, with its digest.

        The folder of a project is located as if it were linked.
        """
        if adapted(name) is not None:
            return locate_adapted(name)
        if names_folder(name):
            return location_of_link(read_project(Path(name)))
        request = parse_request(name)
        if request.registry:
            read_user_config().named(request.registry)  # which must be known
        linked = _linked(request)
        path = find_lock()
        locked = _the_locked(request, path)
        _require_one_owner(request, [one.id for one in (linked, locked) if one is not None])
        if linked is not None:
            return location_of_link(linked.project())
        if locked is not None and path is not None:
            return _location_of_locked(request, locked, path)
        found = _installed(request)
        return None if found is None else location_of_installed(found)

    def known_names(self) -> list[str]:
        """Return the names of everything linked, locked, installed or installable."""
        return sorted({*usable_names(), *_registry_names()})

    def hint(self, name: str) -> str:
        """Return a hint to install `name`, if its registry has it, else an empty text.

        A name without a registry refers to the default one; no other registry is asked about it.
        """
        if adapted(name) is not None:
            return f"run: telescope env link {name}"
        try:
            locate_release(name)
        except TelescopeError:
            return ""
        return f"run: telescope env install {shlex.quote(name)}"


def location_of_link(project: LinkedProject) -> EnvironmentLocation:
    """Return the location of a linked project, which this process imports from its folder."""
    dependencies = installed_closure(project.requires_dist)
    return EnvironmentLocation(
        id=project.id,
        version=project.version,
        factory=project.factory,
        interpreter="",
        place=EnvironmentPlace.LINKED,
        search_path=(str(project.source),),
        registry=str(project.folder),
        lock_digest=_digest(_source_digest(project), dependencies),
        dependencies=dependencies,
    )


def location_of_installed(found: InstalledEnvironment) -> EnvironmentLocation:
    """Return the location of an installed environment and the digest of its code."""
    record = found.installation
    if record is not None and record.locked is not None:
        return _location_of_venv(record, record.locked)
    release = record.release if record is not None else None
    if release is not None:
        code, requires = release.wheel.sha256, release.requires_dist
    else:
        code, requires = _found_in_python(found.distribution)
    dependencies = installed_closure(requires)
    return EnvironmentLocation(
        id=found.id,
        version=found.version,
        factory=found.factory,
        interpreter=found.interpreter,
        place=EnvironmentPlace.SHARED,
        registry=record.registry if record is not None else "",
        wheel_sha256=release.wheel.sha256 if release is not None else "",
        lock_digest=_digest(code, dependencies) if code else "",
        dependencies=dependencies,
        secrets=release.secrets if release is not None else None,
    )


def usable_ids() -> list[str]:
    """Return the ids of everything that can be located: linked, locked or installed."""
    path = find_lock()
    ids = {found.id for found in installed_environments()} | {link.id for link in links()}
    if path is not None:
        ids |= {one.id for one in read_lock(path).environments}
    return sorted(ids)


def usable_names() -> set[str]:
    """Return every name that can be located: ids, names without owners, and `SCHEME:ID`."""
    ids = usable_ids()
    bare = {one.rpartition("/")[2] for one in ids}
    return {*ids, *bare, *(link.name for link in adapted_links())}


def requirements_of(location: EnvironmentLocation) -> tuple[str, ...]:
    """Return the requirements that the environment at `location` declares."""
    if location.place is EnvironmentPlace.LINKED:
        return read_project(Path(location.registry)).requires_dist
    package = packages_of(location.interpreter).get(module_of(location).replace("_", "-"))
    return tuple(package.requires or ()) if package is not None else ()


def module_of(location: EnvironmentLocation) -> str:
    """Return the package whose name the environment's distribution has."""
    return location.factory.partition(":")[0].partition(".")[0]


def _linked(request: Request) -> Link | None:
    fitting = [link for link in links() if request.fits(link.id, "")]
    _require_one_owner(request, [link.id for link in fitting])
    if not fitting:
        return None
    (found,) = fitting
    return found if not request.wanted or matches(found.project().version, request.wanted) else None


def _the_locked(request: Request, path: Path | None) -> LockedEnvironment | None:
    entries = read_lock(path).environments if path is not None else ()
    fitting = [one for one in entries if request.fits(one.id, one.registry)]
    _require_one_owner(request, [one.id for one in fitting])
    return fitting[0] if fitting else None


def _installed(request: Request) -> InstalledEnvironment | None:
    fitting = [
        found
        for found in installed_environments()
        if request.fits(found.id, found.registry)
        and matches(found.version, request.wanted, found.sha256)
    ]
    _require_one_owner(request, [found.id for found in fitting])
    return fitting[0] if fitting else None


def _require_one_owner(request: Request, ids: Iterable[str]) -> None:
    found = sorted(set(ids))
    if len(found) > 1:
        raise ConfigError(
            f"environment {request.typed_id!r} is available from {len(found)} owners: "
            f"{', '.join(found)}; use one of these names"
        )


def _location_of_locked(
    request: Request, locked: LockedEnvironment, path: Path
) -> EnvironmentLocation:
    """Return the location of the locked virtual environment, and never of another one."""
    if not matches(locked.version, request.wanted, locked.sha256):
        raise ConfigError(
            f"{path} locks {locked.id} to {locked.version}, but {request.wanted} was requested; "
            f"leave the version out, or run: telescope env install {locked.id}@{request.wanted}"
        )
    python = python_version()
    if locked.python != python:
        raise EnvironmentLoadError(
            f"{path} locks {locked.id} for Python {locked.python}, but this is Python {python}; "
            f"use Python {locked.python}, or lock it again: telescope env install {locked.id}"
        )
    record = find_built(locked)
    if record is None:
        raise EnvironmentLoadError(
            f"environment {locked.id} {locked.version} is locked in {path}, but what the lock "
            "names is not installed; run: telescope env sync"
        )
    return _location_of_venv(record, locked)


def _location_of_venv(record: Installation, locked: LockedEnvironment) -> EnvironmentLocation:
    release = record.release
    return EnvironmentLocation(
        id=release.id,
        version=release.version,
        factory=release.factory,
        interpreter=record.interpreter,
        place=EnvironmentPlace.ISOLATED,
        registry=record.registry,
        wheel_sha256=locked.sha256,
        lock_digest=locked.digest,
        dependencies=locked_versions(locked.requirements),
        datasets=kept_datasets(locked),
        secrets=release.secrets,
    )


def _source_digest(project: LinkedProject) -> str:
    """Return the sha256 of the names and bytes of the package's files, except byte code."""
    digest = hashlib.sha256()
    for path in sorted((project.source / project.module).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            name = path.relative_to(project.source).as_posix()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _digest(code: str, dependencies: Iterable[str]) -> str:
    """Return one digest of code, packages and Python, like the digest of a lock entry."""
    return sha256_of("\n".join((code, *dependencies, python_version())))


def _found_in_python(name: str) -> tuple[str, Sequence[str]]:
    """Return the digest of a package's RECORD, and its requirements.

    The digest is empty for an editable install, which may change.
    """
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return "", ()
    is_editable = '"editable": true' in (found.read_text("direct_url.json") or "")
    digest = "" if is_editable else sha256_of(found.read_text("RECORD") or "")
    return digest, found.requires or ()


def _registry_names() -> list[str]:
    try:
        registry = open_registry()
        return [*registry.ids(), *registry.aliases()]
    except TelescopeError:
        return []
