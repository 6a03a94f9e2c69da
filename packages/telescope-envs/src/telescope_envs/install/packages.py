"""The packages of an interpreter: list installed and missing ones, add and remove them.

The version of an installed package never changes. An environment that needs another version is
refused with an error that says so.
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from telescope_core.base.errors import EnvironmentLoadError
from telescope_envs.processes.uv import Uv, installed_pins, lacks_wheel, wheels_only

Enters = Callable[[Requirement, Distribution], bool]
"""Decides whether the requirements of an installed package are followed as well."""


def closure(
    requires_dist: Iterable[str], enters: Enters
) -> Iterator[tuple[Requirement, Distribution | None]]:
    """Yield the direct and indirect requirements, each with the installed package, if any."""
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in requires_dist]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:
            yield requirement, None
            continue
        yield requirement, found
        if not enters(requirement, found):
            continue
        for wanted_extra in requirement.extras or {""}:
            key = (str(canonicalize_name(requirement.name)), wanted_extra)
            if key not in seen:
                seen.add(key)
                pending += [(Requirement(text), wanted_extra) for text in found.requires or []]


def missing_requirements(requires_dist: Iterable[str]) -> list[str]:
    """Return the direct and indirect requirements that installed packages do not satisfy.

    They have no markers any more: those that do not apply here are left out.
    """
    missing = [
        str(requirement).partition(";")[0].strip()
        for requirement, found in closure(requires_dist, _fits)
        if found is None or not _fits(requirement, found)
    ]
    return sorted(set(missing))


def _fits(requirement: Requirement, found: Distribution) -> bool:
    return requirement.specifier.contains(found.version, prereleases=True)


def install_requirements(
    requirements: Sequence[str], *, needed_by: str, allow_sdist: Sequence[str] = ()
) -> None:
    """Install `requirements` from the package index, without changing an installed version.

    Only `allow_sdist` may be built from source, because that runs their code.
    """
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "installed.txt"
        constraints.write_text("".join(f"{pin}\n" for pin in installed_pins()))
        arguments = ["install", "--constraints", str(constraints)]
        failure = (
            f"{needed_by} needs {', '.join(requirements)}, which cannot be installed alongside the "
            "packages that are installed now"
        )
        try:
            Uv().run_building(
                lambda built: _here(
                    [*arguments, *wheels_only(built), *requirements], failure=failure
                ),
                allow_sdist,
                python=sys.executable,
            )
        except EnvironmentLoadError as error:
            raise lacks_wheel(str(error), needed_by) or error from None


def is_installed(name: str) -> bool:
    """Return whether this interpreter has the distribution `name` now, according to its folders."""
    plain = re.sub(r"[-_.]+", "_", name)
    folders = [Path(entry) for entry in sys.path if entry]
    return any(any(at.glob(f"{plain}-*.dist-info")) for at in folders)


def uninstall_distribution(name: str) -> None:
    """Remove one distribution."""
    _here(["uninstall", name], failure=f"{name} cannot be removed")


def _here(arguments: Sequence[str], *, failure: str) -> None:
    verb, *rest = arguments
    Uv().run(["pip", verb, "--python", sys.executable, *rest], failure=failure)


CORE = "telescope-core"
"""Packages that come with Telescope itself, which locks and digests leave out."""


def installed_closure(requires_dist: Iterable[str]) -> tuple[str, ...]:
    """Return sorted `name==version` of the installed packages needed, directly or indirectly.

    A package that is missing is reported when the environment is loaded.
    """
    found = closure(requires_dist, lambda requirement, _: not _is_core(requirement))
    pins = {
        str(canonicalize_name(requirement.name)): package.version
        for requirement, package in found
        if package is not None and not _is_core(requirement)
    }
    return tuple(f"{name}=={version}" for name, version in sorted(pins.items()))


def _is_core(requirement: Requirement) -> bool:
    return canonicalize_name(requirement.name) == CORE


def locked_versions(requirements: Iterable[str]) -> tuple[str, ...]:
    """Return `name==version` of a lock's requirement lines that apply to this platform."""
    wanted = (Requirement(line.partition(" --hash=")[0]) for line in requirements)
    return tuple(
        f"{one.name}{one.specifier}"
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyNode:
    """One package and the packages it depends on."""

    name: str
    version: str
    """Empty if it is not installed."""
    wanted: str
    """Version specifier of the package that requires it; empty for any version."""
    is_repeated: bool
    """Whether its dependencies are left out here because they are listed earlier in the tree."""
    needs: tuple["DependencyNode", ...] = ()


def site_packages_of(interpreter: str) -> list[Path]:
    """Return the package folders of the virtual environment that `interpreter` belongs to."""
    return sorted(Path(interpreter).parents[1].glob("lib/python*/site-packages"))


def packages_of(interpreter: str) -> dict[str, Distribution]:
    """Return every package that `interpreter` has installed, by canonical name."""
    if interpreter in ("", sys.executable):
        found = distributions()
    else:
        found = distributions(path=[str(folder) for folder in site_packages_of(interpreter)])
    return {str(canonicalize_name(one.name)): one for one in reversed(list(found)) if one.name}


def dependency_tree(
    requires_dist: Iterable[str], packages: Mapping[str, Distribution]
) -> tuple[DependencyNode, ...]:
    """Return the dependency tree of `requires_dist` in `packages`, expanding each package once."""
    return _nodes(list(requires_dist), "", packages, set())


def _nodes(
    requires_dist: Iterable[str],
    extra: str,
    packages: Mapping[str, Distribution],
    seen: set[str],
) -> tuple[DependencyNode, ...]:
    nodes: list[DependencyNode] = []
    for requirement in sorted(map(Requirement, requires_dist), key=lambda one: one.name.lower()):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": extra}):
            nodes.append(_node(requirement, packages, seen))
    return tuple(nodes)


def _node(
    requirement: Requirement, packages: Mapping[str, Distribution], seen: set[str]
) -> DependencyNode:
    name = str(canonicalize_name(requirement.name))
    extras = sorted(requirement.extras)
    label = f"{name}[{','.join(extras)}]" if extras else name
    found = packages.get(name)
    is_repeated = found is not None and label in seen
    seen.add(label)
    needs: tuple[DependencyNode, ...] = ()
    if found is not None and not is_repeated:
        for wanted in extras or [""]:
            needs += _nodes(found.requires or [], wanted, packages, seen)
    return DependencyNode(
        name=label,
        version=found.version if found is not None else "",
        wanted=str(requirement.specifier),
        is_repeated=is_repeated and bool(found and found.requires),
        needs=needs,
    )
