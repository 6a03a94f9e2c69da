"""What an installed environment depends on, read from the metadata of the packages around it."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyNode:
    """One package, and what it needs."""

    name: str
    version: str
    """Empty: it is not installed."""
    wanted: str
    """Specifier of whoever needs it; empty = any version."""
    is_repeated: bool
    """It stands elsewhere in the tree with what it needs."""
    needs: tuple["DependencyNode", ...] = ()


def site_packages_of(interpreter: str) -> list[Path]:
    """Return the package folders of the virtual environment that `interpreter` belongs to."""
    return sorted(Path(interpreter).parents[1].glob("lib/python*/site-packages"))


def packages_of(interpreter: str) -> dict[str, Distribution]:
    """Return canonical name -> package of all that `interpreter` has installed."""
    if interpreter in ("", sys.executable):
        found = distributions()
    else:
        found = distributions(path=[str(folder) for folder in site_packages_of(interpreter)])
    return {str(canonicalize_name(one.name)): one for one in reversed(list(found)) if one.name}


def dependency_tree(
    requires_dist: Iterable[str], packages: Mapping[str, Distribution]
) -> tuple[DependencyNode, ...]:
    """Return what `requires_dist` means among `packages`, each package written out once."""
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
