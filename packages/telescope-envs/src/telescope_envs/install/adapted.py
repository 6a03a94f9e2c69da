"""Environments of other frameworks: `telescope env link SCHEME:ID`, and locating the links.

Frameworks cannot be installed together, so each set of requirements has a virtual environment of
its own, which its links share. A link is one small record; adapters are in telescope-adapters.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distribution, distributions, version
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from telescope_core.base.errors import ConfigError, EnvironmentLoadError, unknown_name
from telescope_core.base.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_core.base.secret_names import hidden, link_advice, require_own_secrets
from telescope_core.finding.schemes import Adapted, Framework, adapted, require_adapted
from telescope_core.processes.launch import scrubbed
from telescope_envs.install.data import BUILDING, is_running, python_of
from telescope_envs.install.loading import asked
from telescope_envs.install.requirements import ADAPTERS, CORE, direct_needs
from telescope_envs.install.venv import (
    clear_scratch,
    copy_byte_code,
    copy_distribution,
    site_packages,
)
from telescope_envs.processes.uv import Uv, lacks_wheel, wheels_only
from telescope_envs.records.files import (
    data_folder,
    locked,
    locked_if_free,
    remove_tree,
    sha256_of,
    write_atomically,
)
from telescope_envs.records.links import AdaptedLink, adapted_links, adapted_path
from telescope_envs.records.model import read_pyproject, table_at

_DIGITS = 16
_CONTENT_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkPython:
    """A virtual environment with a framework."""

    python: Path
    requirements: tuple[str, ...]
    pins: tuple[str, ...]
    """The packages in it, as in `AdaptedLink.dependencies`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A package that `--with` names."""

    name: str
    requirement: str
    """Requirement in a form that uv reads in any folder."""
    sha256: str = ""
    """Digest of the file, if it is one."""
    is_source: bool = False
    """Whether it must be built; naming a source counts as permission."""
    may_change: bool = False
    """Whether the same requirement may later mean other files, as with a folder or a URL."""


def link_adapted(
    name: str,
    *,
    packages: Sequence[str] = (),
    settings: dict[str, Any] | None = None,
    secrets: Sequence[str] = (),
    allow_sdist: Sequence[str] = (),
) -> AdaptedLink:
    """Make `SCHEME:ID` usable by that name, after checking that it can be built.

    `packages` are installed beside the framework, such as the one that holds the environment; one
    that names the framework itself replaces the version that is usual. `secrets` are the variables
    that it may read, and `allow_sdist` the packages that may be built from source.
    """
    found = require_adapted(name)
    granted = _granted(name, secrets)
    config = {**(settings or {}), **_anywhere(found, settings or {})}
    made = _installed(found, packages, allow_sdist)
    interpreter, pins = ("", ()) if made is None else (str(made.python), made.pins)
    # It is built with what its workers see, such as the home with its caches.
    seen = scrubbed(os.environ, interpreter=interpreter or sys.executable)
    framework = _framework(found, pins)
    try:
        asked(
            "built",
            framework.factory,
            # The byte code stays in its folder: each start would compile the framework again.
            interpreter=(interpreter, "-P", "-s") if interpreter else sys.executable,
            settings=config,
            variables={**seen, **granted},
            what=f"nothing was linked: {name}",
        )
    except EnvironmentLoadError as error:
        text = hidden(str(error), granted.values())
        raise EnvironmentLoadError(f"{text}{link_advice(text, granted)}") from None
    link = AdaptedLink(
        name=name,
        factory=framework.factory,
        interpreter=interpreter,
        config=config,
        requirements=() if made is None else made.requirements,
        dependencies=pins,
        secrets=tuple(granted),
        linked_at=datetime.now(UTC),
    )
    write_atomically(adapted_path(name), link.as_json(indent=2))
    return link


def unlink_adapted(name: str) -> AdaptedLink | None:
    """Remove and return the link of `name`, and its virtual environment if nothing uses it.

    None for a name without a scheme; raises UnknownNameError for one that is not linked.
    """
    links = {link.name: link for link in adapted_links()}
    link = links.pop(name, None)
    if link is None:
        if adapted(name) is not None:
            raise unknown_name("link", name, links, "(telescope env list --installed)")
        return None
    adapted_path(name).unlink(missing_ok=True)
    if link.interpreter:
        folder = Path(link.interpreter).parents[1]
        with locked_if_free(_lock_of(folder)) as is_ours:
            if is_ours:
                _remove_unused(folder)
    return link


def locate_adapted(name: str) -> EnvironmentLocation | None:
    """Return the location of the linked `SCHEME:ID`; None if it is not linked."""
    link = next((link for link in adapted_links() if link.name == name), None)
    if link is None:
        return None
    if link.factory.startswith("telescope_core.adapters."):
        raise EnvironmentLoadError(
            f"{name} was linked before telescope-adapters was a package of its own; link it again "
            f"with the same options: telescope env link {name}"
        )
    config = msgspec.json.encode({"config": link.config}).decode()
    content = "\n".join((link.factory, version(CORE), config, *link.secrets))
    digest = sha256_of("\n".join((content, *link.dependencies)))
    return EnvironmentLocation(
        id=name,
        version=framework_version(link),
        factory=link.factory,
        interpreter=link.interpreter,
        config=link.config,
        place=EnvironmentPlace.ISOLATED if link.interpreter else EnvironmentPlace.LINKED,
        lock_digest=digest,
        dependencies=link.dependencies,
        secrets=link.secrets,
    )


def framework_version(link: AdaptedLink) -> str:
    """Return the version of the framework; "0" if there is none."""
    names = {one.distribution for one in require_adapted(link.name).frameworks}
    pins = dict(pin.split("==", 1) for pin in link.dependencies if "==" in pin)
    return next((pins[name] for name in sorted(names) if name in pins), "0")


def _granted(name: str, secrets: Sequence[str]) -> dict[str, str]:
    """Return the values of the variables that `name` may read, by name in order.

    Raises ConfigError for one that is not set, and EnvironmentLoadError for one of Telescope's.
    """
    require_own_secrets(secrets, name)
    if secrets and require_adapted(name).frameworks[0].is_elsewhere:
        raise ConfigError(
            f"{name} runs elsewhere, where no variable of yours is read; leave out "
            f"{' '.join(f'--secret {one}' for one in secrets)}"
        )
    unset = sorted(one for one in secrets if not os.environ.get(one))
    if unset:
        raise ConfigError(
            f"--secret names environment variables that are not set here: {', '.join(unset)}; set "
            "them, or leave out what the environment does not need"
        )
    return {one: os.environ[one] for one in sorted(set(secrets))}


def _anywhere(found: Adapted, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the id, and what else names a file, as workers read it, which start elsewhere."""
    if found.scheme == "harbor":
        registry = str(settings.get("registry") or "")
        if not registry:
            return {"id": str(Path(found.id).expanduser().resolve())}
        is_file = "://" not in registry
        place = str(Path(registry).expanduser().resolve()) if is_file else registry
        return {"id": found.id, "registry": place}
    file, at, task = found.id.partition("@")
    is_file = found.scheme == "inspect" and file.endswith(".py")
    return {"id": f"{Path(file).resolve()}{at}{task}" if is_file else found.id}


def _package(text: str) -> _Package:
    """Return the package of `--with TEXT`: a requirement, or a local wheel, sdist or folder."""
    path = Path(text)
    is_file = path.is_file()
    if is_file or (path.is_dir() and (os.sep in text or (path / "pyproject.toml").exists())):
        name = _name_in(path, text)
        return _Package(
            name=name,
            requirement=f"{name} @ {path.resolve().as_uri()}",
            sha256=sha256_of(path.read_bytes()) if is_file else "",
            is_source=path.suffix != ".whl",
            may_change=not is_file,
        )
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise ConfigError(
            f"--with {text}: there is no such file or folder, and it names no package; expected "
            "name, name==1.2 or name @ URL, or a wheel, an sdist or a project's folder that is "
            "there"
        ) from None
    url = requirement.url or ""
    return _Package(
        name=canonicalize_name(requirement.name),
        requirement=text,
        is_source=bool(url) and not url.partition("#")[0].endswith(".whl"),
        may_change=bool(url),
    )


def _name_in(path: Path, text: str) -> str:
    """Return the name of the package in a file or a folder."""
    try:
        if path.is_dir():
            project = table_at(read_pyproject(path), "project", path=path)
            if isinstance(name := project.get("name"), str):
                return canonicalize_name(name)
        elif path.suffix == ".whl":
            return parse_wheel_filename(path.name)[0]
        else:
            return parse_sdist_filename(path.name)[0]
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise ConfigError(
            f"--with {text}: {error}; expected a wheel (name-1.2-py3-none-any.whl) or an sdist "
            "(name-1.2.tar.gz)"
        ) from None
    raise ConfigError(
        f"--with {text}: its pyproject.toml has no project.name; build a wheel of it and name that"
    )


def _installed(
    found: Adapted, packages: Sequence[str], allow_sdist: Sequence[str]
) -> FrameworkPython | None:
    """Return the framework's Python; None where it needs none.

    It has the usual version of the framework unless `packages` name one. If the packages accept
    only other versions, it has the newest that they accept, and an adapter plays it.
    """
    first, last = found.frameworks[0], found.frameworks[-1]
    if not first.distribution:
        if packages:
            why = "run elsewhere" if first.is_elsewhere else "are files"
            raise ConfigError(
                f"{found.scheme}: environments {why}, so no package is installed for them; leave "
                f"out {', '.join(packages)}"
            )
        return None
    own = canonicalize_name(first.distribution)
    if any(_package(one).name == own for one in packages):
        choices: list[list[str]] = [[]]
    else:
        choices = [[first.requirement]]
        if packages:
            choices.append([f"{first.distribution}>={first.lowest},<{last.below}"])
    trouble: EnvironmentLoadError | None = None
    for choice in choices:
        try:
            return environment_for(found.scheme, [*choice, *packages], allow_sdist=allow_sdist)
        except EnvironmentLoadError as error:
            trouble = error
    assert trouble is not None, "there is always a choice"
    raise _explained(trouble, found, packages) from None


def _explained(
    error: EnvironmentLoadError, found: Adapted, packages: Sequence[str]
) -> EnvironmentLoadError:
    """Return the error with advice that fits uv's message."""
    text, what = str(error), ", ".join(packages) or found.scheme
    no_wheel = lacks_wheel(text, what)
    if no_wheel is not None:
        return no_wheel
    played = f"{found.frameworks[0].distribution} {_played(found)}"
    if re.search(r"\bgit\b", text) and re.search("fetch|clone", text):
        url = next(iter(re.findall(r"git\+\S+|https?://\S+|ssh://\S+", text)), "a repository")
        return EnvironmentLoadError(
            f"{what} cannot be installed: one of its packages is pinned to {url.rstrip('`.,)')}, "
            f"which git cannot fetch from here; use a release of it that asks for {played}"
        )
    if "No solution found" in text or "unsatisfiable" in text:
        return EnvironmentLoadError(
            f"{text}\nThe adapter plays {played}. If the package asks for another version, it is "
            "too old or too new to be played; use another release of it"
        )
    return error


def environment_for(
    scheme: str, packages: Sequence[str], *, allow_sdist: Sequence[str] = ()
) -> FrameworkPython:
    """Return a virtual environment with `packages` and the adapters; links share them.

    With a folder or a URL, whose files may have changed, it is made anew, and kept only if no
    earlier one has the same files. Links, evals and runs keep the one that they began with.
    """
    own = (CORE, ADAPTERS)
    given = [_package(one) for one in packages]
    needs = direct_needs(one.requirement for one in given)
    marks = (*(one.sha256 for one in given), *sorted(allow_sdist))
    made_of = "\n".join((sys.version, *(f"{one}=={version(one)}" for one in own), *needs, *marks))
    folder = data_folder() / "adapters" / f"{scheme}-{sha256_of(made_of)[:_DIGITS]}"
    may_change = [one.name for one in given if one.may_change]
    with locked(_lock_of(folder), what=f"making a virtual environment for {scheme}"):
        if may_change or not python_of(folder).exists():
            scratch, uv = folder.with_name(f"{BUILDING}{folder.name}"), Uv()
            clear_scratch(scratch)
            try:
                uv.make_venv(scratch, moves=True)
                python = str(python_of(scratch))
                sources = [one.name for one in given if one.is_source]
                arguments = [
                    *("pip", "install", "--python", python),
                    # Else uv takes what it built of a folder before its files changed.
                    *(part for name in may_change for part in ("--refresh-package", name)),
                ]
                failure = f"{', '.join(packages)} cannot be installed"
                uv.run_building(
                    lambda built: uv.run_cache_first(
                        [*arguments, *wheels_only([*sources, *built]), *needs], failure=failure
                    ),
                    allow_sdist,
                    python=python,
                )
                for name in own:
                    copy_distribution(distribution(name), site_packages(scratch))
                copy_byte_code(site_packages(scratch))
                if may_change:
                    content = sha256_of("\n".join(_pins(site_packages(scratch))))
                    folder = folder.with_name(f"{folder.name}.{content[:_DIGITS]}")
                if not python_of(folder).exists():
                    clear_scratch(folder)
                    scratch.rename(folder)
            finally:
                remove_tree(scratch)
            _remove_unused(folder, keeps=folder)
    return FrameworkPython(
        python=python_of(folder),
        requirements=tuple(one.requirement for one in given),
        pins=_pins(site_packages(folder)),
    )


def _lock_of(folder: Path) -> Path:
    """Return the file that is locked while virtual environments for the same packages are made."""
    return folder.with_name(f"{folder.name.partition('.')[0]}.lock")


def _remove_unused(folder: Path, *, keeps: Path | None = None) -> None:
    """Remove `folder`, and those for the same packages with other files, but those in use.

    No link names them then, and no process was started from them. The caller holds their lock.
    """
    linked = {Path(link.interpreter).parents[1] for link in adapted_links() if link.interpreter}
    for one in sorted(folder.parent.glob(f"{folder.name.partition('.')[0]}*")):
        if one.is_dir() and one != keeps and one not in linked and not is_running(one):
            remove_tree(one)


def _pins(folder: Path) -> tuple[str, ...]:
    """Return `name==version` of the packages in `folder`, without what is edited in place.

    Packages installed from a file, a folder or a URL have the digest of its files as their local
    version, because the same name and version may hold other code there.
    """
    pins: list[str] = []
    for found in distributions(path=[str(folder)]):
        pin = f"{canonicalize_name(found.name)}=={found.version}"
        origin: Any = json.loads(found.read_text("direct_url.json") or "null")
        if origin is not None and origin.get("dir_info", {}).get("editable"):
            continue
        if origin is not None:
            files = sorted(
                f"{file} {sha256_of(Path(str(found.locate_file(file))).read_bytes())}"
                for file in found.files or ()
                # Not what describes it, nor scripts, which name the folder that they are in.
                if file.name == "entry_points.txt"
                or (not file.parts[0].endswith((".dist-info", "..")) and file.suffix != ".pyc")
            )
            mark = sha256_of("\n".join(files))[:_CONTENT_DIGITS]
            pin += f"{'.' if '+' in found.version else '+'}{mark}"
        pins.append(pin)
    return tuple(sorted(pins))


def _framework(found: Adapted, pins: Sequence[str]) -> Framework:
    """Return the generation of the framework that was installed."""
    first = found.frameworks[0]
    installed = dict(pin.split("==", 1) for pin in pins).get(first.distribution, "")
    fitting = found.fitting(installed)
    if fitting is None:
        raise EnvironmentLoadError(
            f"{first.distribution} {installed or '(none)'} was installed, but the adapters were "
            f"tested with {_played(found)}; add --with {found.frameworks[0].requirement}"
        )
    return fitting


def _played(found: Adapted) -> str:
    """Return the versions of the framework for which there is an adapter."""
    return " or ".join(f">={one.lowest},<{one.below}" for one in found.frameworks)
