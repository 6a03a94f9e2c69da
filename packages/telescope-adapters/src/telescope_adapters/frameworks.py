"""The frameworks: the versions that each adapter was tested with, and who plays a scheme.

Core finds the schemes by the entry points `telescope.adapters`. Nothing here imports a framework
before it is asked to. The adapters themselves are elsewhere, and so are the virtual environments
that `telescope env link` makes for them.
"""

import traceback
from dataclasses import replace
from importlib import import_module
from typing import Any

from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.finding.schemes import Framework, installed_version

GYMNASIUM = Framework(
    distribution="gymnasium",
    extra="gymnasium",
    pin="1.4.0",
    lowest="1.4",
    below="1.5",
    factory="telescope_adapters.gymnasium:GymEnvironment",
)
TEXTARENA = Framework(
    distribution="textarena",
    extra="textarena",
    pin="0.7.4",
    lowest="0.7.4",
    below="0.8",
    factory="telescope_adapters.textarena:ArenaEnvironment",
)
VERIFIERS = Framework(
    distribution="verifiers",
    extra="verifiers",
    pin="0.3.1",
    lowest="0.1.8",
    below="0.4",
    factory="telescope_adapters.verifiers:VerifiersEnvironment",
)
VERIFIERS_SERVED = replace(VERIFIERS, lowest="0.3.1")
"""Framework for training with our environments: `verifiers_served`."""
VERIFIERS_TASKS = Framework(
    distribution="verifiers",
    extra="verifiers-tasks",
    pin="0.4.0",
    lowest="0.4",
    below="0.5",
    factory="telescope_adapters.verifiers_tasks:VerifiersTasksEnvironment",
)
"""The new API, which shares nothing with the old one."""
INSPECT = Framework(
    distribution="inspect-ai",
    extra="inspect",
    pin="0.3.285",
    lowest="0.3.285",
    below="0.4",
    factory="telescope_adapters.inspect_ai:InspectEnvironment",
)
OPENENV = Framework(
    distribution="",
    factory="telescope_adapters.openenv:OpenEnvEnvironment",
    is_elsewhere=True,
)
"""The server is used over its WebSocket, in the protocol of OpenEnv 0.10."""
NEMO_GYM = Framework(
    distribution="",
    factory="telescope_adapters.nemo_gym:NemoGymEnvironment",
    is_elsewhere=True,
)
"""A resources server is played over HTTP, as those of NeMo Gym 0.4 speak."""
ORS = Framework(distribution="", factory="telescope_adapters.ors:OrsEnvironment", is_elsewhere=True)
"""A server is played over HTTP, as the package openreward 0.1.167 speaks."""
HARBOR = Framework(distribution="", factory="telescope_adapters.harbor:HarborEnvironment")
"""Task folders are read as documented for Harbor 0.26; nothing of Harbor is imported."""
OPENENV_SERVER = Framework(
    distribution="openenv",
    extra="openenv",
    pin="0.10.0",
    lowest="0.10",
    below="0.11",
    factory="telescope_adapters.serving.openenv_server:openenv_app",
)
"""Framework that serves our environments; it has no scheme, because none of its own are played."""
GYM_SCHEME = (GYMNASIUM,)
HARBOR_SCHEME = (HARBOR,)
INSPECT_SCHEME = (INSPECT,)
NEMO_GYM_SCHEME = (NEMO_GYM,)
OPENENV_SCHEME = (OPENENV,)
ORS_SCHEME = (ORS,)
TEXTARENA_SCHEME = (TEXTARENA,)
VERIFIERS_SCHEME = (VERIFIERS, VERIFIERS_TASKS)
"""Each scheme has its framework, or its generations: the one that is installed unless told
otherwise is the first."""


def imported(framework: Framework, module: str) -> Any:
    """Import `module` of `framework`; raises EnvironmentLoadError with the line that installs it.

    Typed as Any, because the checker of types runs where no framework is installed.
    """
    found = installed_version(framework)
    install = f"pip install 'telescope-adapters[{framework.extra}]'"
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
    """Return a sentence about the missing module behind `error`, its importer, and what to do.

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
        if missing.path:  # the package is there, and lacks a name
            return (
                f"{where}{missing}: it was written for another version of {package}; add the one "
                "that it needs to `telescope env link`, such as --with 'PACKAGE==VERSION'"
            )
        return (
            f"{where}{missing}; add --with PACKAGE, naming the package that has it, to "
            "`telescope env link`"
        )
    advice = f"with --with {otherwise.requirement}" if otherwise else "with the version it needs"
    return (
        f"{where}{missing}: it was written for another version of {framework.distribution} than "
        f"{installed_version(framework)}; link it {advice}"
    )
