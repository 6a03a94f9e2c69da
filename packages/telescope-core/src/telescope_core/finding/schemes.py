"""The schemes of `SCHEME:ID`: environments of other frameworks, and the adapter class of each.

Adapters are packages of their own, which core finds by the entry points `telescope.adapters`: the
name is a scheme, the object a tuple of `Framework`. Nothing here imports a framework.
"""

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, version

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, unknown_name

_KNOWN = ("gym", "harbor", "inspect", "nemo-gym", "openenv", "ors", "textarena", "verifiers")
"""Schemes of telescope-adapters, known here so that errors can name the package to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The versions of a framework that an adapter was tested with."""

    distribution: str
    """Name of its package; empty where the adapter needs none."""
    extra: str = ""
    """The extra of telescope-adapters that installs it."""
    pin: str = ""
    """The version that `telescope env link` installs."""
    lowest: str = ""
    below: str = ""
    """The first version that is too new."""
    factory: str
    """`module:Class` of its adapter."""
    is_elsewhere: bool = False
    """Whether a server plays it, so that no package or variable of this machine matters."""

    @property
    def requirement(self) -> str:
        """Requirement that `telescope env link` installs; empty if the adapter needs none."""
        return f"{self.distribution}=={self.pin}" if self.distribution else ""

    def takes(self, found: str) -> bool:
        """Return whether `found` is a version that the adapter was tested with."""
        return _numbers(self.lowest) <= _numbers(found) < _numbers(self.below)


def _adapters() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="telescope.adapters")}


def schemes() -> list[str]:
    """Return the names of all schemes, in order."""
    return sorted({*_KNOWN, *_adapters()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """An environment of another framework."""

    scheme: str
    id: str
    """Name of the environment in its framework."""

    @property
    def frameworks(self) -> tuple[Framework, ...]:
        """The supported generations of the framework; the usual one is the first.

        Raises ConfigError where the package that plays them is not installed.
        """
        point = _adapters().get(self.scheme)
        if point is None:
            raise ConfigError(
                f"{self.scheme}:{self.id} is an environment of another framework, and the package "
                "telescope-adapters, which plays those, is not installed in this Python; run: "
                "pip install telescope-adapters"
            )
        return point.load()

    def fitting(self, found: str) -> Framework | None:
        """Return the generation that version `found` belongs to; None where no adapter takes it."""
        fitting = [one for one in self.frameworks if not one.distribution or one.takes(found)]
        return fitting[0] if fitting else None


def adapted(name: str) -> Adapted | None:
    """Return scheme and id of `SCHEME:ID`; None if `name` does not begin with a known scheme."""
    scheme, _, given = name.partition(":")
    return Adapted(scheme=scheme, id=given) if given and scheme in schemes() else None


def require_adapted(name: str) -> Adapted:
    """Return scheme and id of `SCHEME:ID`; raises for other names.

    Raises UnknownNameError with the nearest scheme, and ConfigError for one without an id.
    """
    found = adapted(name)
    if found is None:
        scheme, _, given = name.partition(":")
        if scheme in schemes():
            raise ConfigError(
                f"expected {scheme}:ID, such as gym:FrozenLake-v1, got {name!r}: what the "
                "environment is called is missing"
            )
        advice = "" if given else "; expected SCHEME:ID, such as gym:FrozenLake-v1"
        raise unknown_name("scheme", scheme, schemes(), f"({name!r}{advice})")
    return found


def installed_version(framework: Framework) -> str:
    """Return the version that is installed in this Python; empty if none is, or none is needed."""
    try:
        return version(framework.distribution) if framework.distribution else ""
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version, such as (0, 7, 4)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])
