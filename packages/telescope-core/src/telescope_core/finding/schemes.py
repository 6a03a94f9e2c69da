"""The schemes of `SCHEME:ID`: which framework each names, and which adapter plays it.

Nothing here imports a framework. What is left to others: the adapters themselves, and the virtual
environments that `telescope env link` makes for them.
"""

import re
import traceback
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from telescope_core.base.errors import ConfigError, EnvironmentLoadError, unknown_name

_HERE = "telescope_core.adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The versions of a framework that an adapter was tested with."""

    distribution: str
    """Name of its package; empty where the adapter needs none."""
    extra: str = ""
    """The extra of telescope-core that installs it."""
    pin: str = ""
    """The version that `telescope env link` installs."""
    lowest: str = ""
    below: str = ""
    """The first version that is not taken."""
    factory: str
    """`module:Class` of its adapter."""

    @property
    def requirement(self) -> str:
        """What `telescope env link` installs; empty where the adapter needs nothing."""
        return f"{self.distribution}=={self.pin}" if self.distribution else ""

    def takes(self, found: str) -> bool:
        """Whether `found` is a version that the adapter was tested with."""
        return _numbers(self.lowest) <= _numbers(found) < _numbers(self.below)


GYMNASIUM = Framework(
    distribution="gymnasium",
    extra="gymnasium",
    pin="1.4.0",
    lowest="1.4",
    below="1.5",
    factory=f"{_HERE}.gymnasium:GymEnvironment",
)
TEXTARENA = Framework(
    distribution="textarena",
    extra="textarena",
    pin="0.7.4",
    lowest="0.7.4",
    below="0.8",
    factory=f"{_HERE}.textarena:ArenaEnvironment",
)
VERIFIERS = Framework(
    distribution="verifiers",
    extra="verifiers",
    pin="0.3.1",
    lowest="0.1.8",
    below="0.4",
    factory=f"{_HERE}.verifiers:VerifiersEnvironment",
)
VERIFIERS_SERVED = replace(VERIFIERS, lowest="0.3.1")
"""What trains with ours: `verifiers_served`."""
VERIFIERS_TASKS = Framework(
    distribution="verifiers",
    extra="verifiers-tasks",
    pin="0.4.0",
    lowest="0.4",
    below="0.5",
    factory=f"{_HERE}.verifiers_tasks:VerifiersTasksEnvironment",
)
"""Their new API, which has nothing of the old one."""
INSPECT = Framework(
    distribution="inspect-ai",
    extra="inspect",
    pin="0.3.285",
    lowest="0.3.285",
    below="0.4",
    factory=f"{_HERE}.inspect_ai:InspectEnvironment",
)
OPENENV = Framework(distribution="", factory=f"{_HERE}.openenv:OpenEnvEnvironment")
"""A server is played over its WebSocket, as OpenEnv 0.10 speaks."""
OPENENV_SERVER = Framework(
    distribution="openenv",
    extra="openenv",
    pin="0.10.0",
    lowest="0.10",
    below="0.11",
    factory=f"{_HERE}.openenv_server:openenv_app",
)
"""What serves ours; it has no scheme, because nothing of it is played."""
SCHEMES = {
    "gym": (GYMNASIUM,),
    "inspect": (INSPECT,),
    "openenv": (OPENENV,),
    "textarena": (TEXTARENA,),
    "verifiers": (VERIFIERS, VERIFIERS_TASKS),
}
"""Scheme -> its framework, or its generations: the one that is installed unless told otherwise is
the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """An environment of another framework."""

    scheme: str
    id: str
    """What the framework calls it."""

    @property
    def frameworks(self) -> tuple[Framework, ...]:
        """The generations of the framework that have an adapter."""
        return SCHEMES[self.scheme]

    def fitting(self, found: str) -> Framework | None:
        """Return the generation that version `found` belongs to; None where no adapter takes it."""
        fitting = [one for one in self.frameworks if not one.distribution or one.takes(found)]
        return fitting[0] if fitting else None


def adapted(name: str) -> Adapted | None:
    """Return what `SCHEME:ID` names; None if `name` does not begin with a known scheme."""
    scheme, _, given = name.partition(":")
    return Adapted(scheme=scheme, id=given) if scheme in SCHEMES and given else None


def require_adapted(name: str) -> Adapted:
    """Return what `SCHEME:ID` names.

    Raises UnknownNameError with the nearest scheme, and ConfigError for one without an id.
    """
    found = adapted(name)
    if found is None:
        scheme, _, given = name.partition(":")
        if scheme in SCHEMES:
            raise ConfigError(
                f"expected {scheme}:ID, such as gym:FrozenLake-v1, got {name!r}: what the "
                "environment is called is missing"
            )
        advice = "" if given else "; expected SCHEME:ID, such as gym:FrozenLake-v1"
        raise unknown_name("scheme", scheme, SCHEMES, f"({name!r}{advice})")
    return found


def installed_version(framework: Framework) -> str:
    """Return the version that this Python has; empty for none, or where none is needed."""
    try:
        return version(framework.distribution) if framework.distribution else ""
    except PackageNotFoundError:
        return ""


def imported(framework: Framework, module: str) -> Any:
    """Import `module` of `framework`; raises EnvironmentLoadError with the line that installs it.

    Typed as Any, because the checker of types runs where no framework is installed.
    """
    found = installed_version(framework)
    install = f"pip install 'telescope-core[{framework.extra}]'"
    wanted = f"{framework.distribution}>={framework.lowest},<{framework.below}"
    if not found:
        raise EnvironmentLoadError(f"{wanted} is not installed in this Python; run: {install}")
    if not framework.takes(found):
        raise EnvironmentLoadError(
            f"{framework.distribution} {found} is installed, but this adapter was tested with "
            f"{wanted} and takes no other version; run: {install}"
        )
    return import_module(module)


def missing_import(
    error: BaseException, framework: Framework, *, otherwise: Framework | None = None
) -> str:
    """Return which module is missing, who imports it and what to do, where `error` came of that.

    Frameworks raise an error of their own in its place, which does not say. Empty if no import
    failed. `otherwise` is the generation to link with if the framework itself lacks the module.
    """
    missing: ImportError | None = None
    came_of: BaseException | None = error
    while came_of is not None:
        missing = came_of if isinstance(came_of, ImportError) and came_of.name else missing
        came_of = came_of.__cause__ or came_of.__context__
    if missing is None:
        return ""
    frames = traceback.extract_tb(missing.__traceback__)
    by = [one for one in frames if not one.filename.startswith("<") and "importlib" not in one.name]
    where = f"{by[-1].filename}, line {by[-1].lineno}: " if by else ""
    package = str(missing.name).partition(".")[0]
    if package != framework.distribution.replace("-", "_"):
        return (
            f"{where}{missing}; add --with PACKAGE, naming the package that has it, to "
            "`telescope env link`"
        )
    advice = f"with --with {otherwise.requirement}" if otherwise else "with the version it needs"
    return (
        f"{where}{missing}: it was written for another version of {framework.distribution} than "
        f"{installed_version(framework)}; link it {advice}"
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release numbers of a version, such as (0, 7, 4)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])
