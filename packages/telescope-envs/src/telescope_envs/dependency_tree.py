"""The dependencies of an installed environment, read from the metadata of installed packages."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


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
