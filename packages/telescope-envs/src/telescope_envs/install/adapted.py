"""Environments of other frameworks: `telescope env link SCHEME:ID`, and where one is afterwards.

Frameworks cannot be installed together, so each set of requirements has a virtual environment of
its own, which its links share. A link is one small record; adapters are in telescope-core.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from telescope_core.adapters.schemes import Adapted, Framework, adapted, require_adapted
from telescope_core.errors import ConfigError, EnvironmentLoadError, unknown_name
from telescope_core.protocols import EnvironmentLocation, EnvironmentPlace
from telescope_envs.install.loading import asked
from telescope_envs.install.requirements import CORE, direct_needs
from telescope_envs.install.venv import link_distribution, new_folder, site_packages
from telescope_envs.processes.uv import Uv, wheels_only
from telescope_envs.records.files import (
    data_folder,
    locked,
    remove_tree,
    sha256_of,
    write_atomically,
)
from telescope_envs.records.links import AdaptedLink, adapted_links, adapted_path

_LOAD_LIMIT_S = 300.0
_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkPython:
    """A virtual environment of a framework."""

    python: Path
    pins: tuple[str, ...]
    """`name==version` of each package in it."""


def link_adapted(
    name: str, *, packages: Sequence[str] = (), settings: dict[str, Any] | None = None
) -> AdaptedLink:
    """Make `SCHEME:ID` usable by that name, after checking that it can be built.

    `packages` are installed beside the framework, such as the one that holds the environment; one
    that names the framework itself replaces the version that is usual.
    """
    found = require_adapted(name)
    config = {**(settings or {}), "id": _anywhere(found)}
    wanted = _wanted(found, packages)
    made = environment_for(found.scheme, wanted) if wanted else None
    pins = () if made is None else made.pins
    framework = _framework(found, pins)
    python = None if made is None else made.python
    asked(
        "built",
        framework.factory,
        interpreter=sys.executable if python is None else str(python),
        settings=config,
        what=f"nothing was linked: {name}",
        limit_s=_LOAD_LIMIT_S,
    )
    link = AdaptedLink(
        name=name,
        factory=framework.factory,
        interpreter="" if python is None else str(python),
        config=config,
        requirements=tuple(wanted),
        dependencies=pins,
        linked_at=datetime.now(UTC),
    )
    write_atomically(adapted_path(name), link.as_json(indent=2))
    return link


def unlink_adapted(name: str) -> AdaptedLink | None:
    """Remove and return the link of `name`, and its virtual environment if no other needs it.

    None for a name without a scheme; raises UnknownNameError for one that is not linked.
    """
    links = {link.name: link for link in adapted_links()}
    link = links.pop(name, None)
    if link is None:
        if adapted(name) is not None:
            raise unknown_name("link", name, links, "(telescope env list --installed)")
        return None
    adapted_path(name).unlink(missing_ok=True)
    if link.interpreter and link.interpreter not in {one.interpreter for one in links.values()}:
        remove_tree(Path(link.interpreter).parents[1])
    return link


def locate_adapted(name: str) -> EnvironmentLocation | None:
    """Return where the linked `SCHEME:ID` is; None if it is not linked."""
    link = next((link for link in adapted_links() if link.name == name), None)
    if link is None:
        return None
    config = msgspec.json.encode({"config": link.config}).decode()
    content = "\n".join((link.factory, version(CORE), config))
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
    )


def framework_version(link: AdaptedLink) -> str:
    """Return the version of the framework; "0" where there is none."""
    names = {one.distribution for one in require_adapted(link.name).frameworks}
    pins = dict(pin.split("==", 1) for pin in link.dependencies if "==" in pin)
    return next((pins[name] for name in sorted(names) if name in pins), "0")


def _wanted(found: Adapted, packages: Sequence[str]) -> list[str]:
    """Return what is installed: the usual version of the framework, unless `packages` name one."""
    usual = found.frameworks[0].requirement
    if not usual and packages:
        raise ConfigError(
            f"{found.scheme}: environments run elsewhere, so no package is installed for them; "
            f"leave out {', '.join(packages)}"
        )
    own = canonicalize_name(found.frameworks[0].distribution)
    is_named = any(_name_of(package) == own for package in packages)
    return [*([usual] if usual and not is_named else []), *map(_absolute, packages)]


def _anywhere(found: Adapted) -> str:
    """Return the id so that it means the same in workers, which start in another folder."""
    file, at, task = found.id.partition("@")
    is_file = found.scheme == "inspect" and file.endswith(".py")
    return f"{Path(file).resolve()}{at}{task}" if is_file else found.id


def _name_of(package: str) -> str:
    """Return the name of a package; empty for a folder or a wheel, which uv reads."""
    if os.path.exists(package):
        return ""
    try:
        return canonicalize_name(Requirement(package).name)
    except InvalidRequirement:
        raise ConfigError(
            f"--with {package}: there is no such file or folder, and it names no package; expected "
            "name or name==1.2, or a wheel or a project's folder that is there"
        ) from None


def _absolute(package: str) -> str:
    return str(Path(package).resolve()) if os.path.exists(package) else package


def environment_for(scheme: str, wanted: Sequence[str]) -> FrameworkPython:
    """Return a virtual environment with `wanted` and telescope-core, which links share."""
    needs = direct_needs(wanted) if not _has_folder(wanted) else [*direct_needs(()), *wanted]
    made_of = "\n".join((sys.version, version(CORE), *needs))
    folder = data_folder() / "adapters" / f"{scheme}-{sha256_of(made_of)[:_DIGITS]}"
    uv = Uv()
    with locked(folder.with_suffix(".lock"), what=f"making a virtual environment for {scheme}"):
        if _has_folder(wanted) or not (folder / "bin" / "python").exists():
            _make(folder, needs, wanted, uv)
    python = folder / "bin" / "python"
    listed = uv.run(["pip", "freeze", "--python", str(python)], failure=f"{folder} is unreadable")
    pins = tuple(line for line in listed.splitlines() if not line.startswith("-e "))
    return FrameworkPython(python=python, pins=pins)


def _make(folder: Path, needs: Sequence[str], wanted: Sequence[str], uv: Uv) -> None:
    scratch = folder.with_name(f".building-{folder.name}")
    with new_folder(folder, scratch):
        uv.make_venv(scratch, moves=True)
        binary = [] if _has_folder(wanted) else wheels_only(())
        uv.run_cache_first(
            ["pip", "install", "--python", str(scratch / "bin" / "python"), *binary, *needs],
            failure=f"{', '.join(wanted)} cannot be installed",
        )
        link_distribution(distribution(CORE), site_packages(scratch))


def _has_folder(wanted: Sequence[str]) -> bool:
    """Whether a project's folder is among `wanted`, whose files may change."""
    return any(os.path.isdir(one) for one in wanted)


def _framework(found: Adapted, pins: Sequence[str]) -> Framework:
    """Return the generation of the framework that was installed."""
    first = found.frameworks[0]
    installed = dict(pin.split("==", 1) for pin in pins if "==" in pin).get(first.distribution, "")
    fitting = found.fitting(installed)
    if fitting is None:
        taken = " or ".join(f">={one.lowest},<{one.below}" for one in found.frameworks)
        raise EnvironmentLoadError(
            f"{first.distribution} {installed or '(none)'} was installed, but the adapters were "
            f"tested with {taken}; add --with {found.frameworks[0].requirement}"
        )
    return fitting
