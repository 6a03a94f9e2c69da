"""The packages of this interpreter that satisfy an environment's requirements."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CORE = "telescope-core"
"""It comes with Telescope itself, so it is left out of locks and digests."""


def installed_closure(requires_dist: Iterable[str]) -> tuple[str, ...]:
    """Return sorted `name==version` of the installed packages needed, directly or indirectly."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in requires_dist]
    while pending:
        requirement, extra = pending.pop()
        name = str(canonicalize_name(requirement.name))
        marker = requirement.marker
        if name == CORE or (marker is not None and not marker.evaluate({"extra": extra})):
            continue
        try:
            here = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # reported when the environment is loaded
        found[name] = here.version
        for wanted_extra in requirement.extras or {""}:
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                pending += [(Requirement(text), wanted_extra) for text in here.requires or []]
    return tuple(f"{name}=={version}" for name, version in sorted(found.items()))


def locked_versions(requirements: Iterable[str]) -> tuple[str, ...]:
    """Return `name==version` of a lock's requirement lines that apply to this platform."""
    wanted = (Requirement(line.partition(" --hash=")[0]) for line in requirements)
    return tuple(
        f"{one.name}{one.specifier}"
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    )
