"""From an environment's name to an `EnvironmentClient`: ask the locators, load, or start workers.

Names: an installed id (`math-reasoning`, `owner/name`, with optional `@version`), or
`module:Class` for code that is importable as it is.
"""

import asyncio
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from telescope_core.environment_record import EnvironmentRecord, elsewhere, record_of
from telescope_core.environments.base import Environment
from telescope_core.errors import (
    ConfigError,
    EnvironmentLoadError,
    UnknownNameError,
    nearest,
    unknown_name,
)
from telescope_core.in_process import InProcessEnvironment
from telescope_core.processes import (
    TOKEN_VARIABLE,
    EnvironmentPool,
    Isolation,
    LocalPlace,
    ProcessSettings,
    RemotePlace,
)
from telescope_core.processes.handshake import Identity
from telescope_core.processes.launch import Place
from telescope_core.protocols import EnvironmentClient, EnvironmentLocation, EnvironmentLocator


def locators() -> list[EnvironmentLocator]:
    """Return every installed locator."""
    points = sorted(entry_points(group="telescope.environment_locators"), key=lambda p: p.name)
    return [point.load()() for point in points]


def locate_environment(name: str) -> EnvironmentLocation:
    """Return where `name` is; raises UnknownNameError with the command that would install it."""
    if _names_a_class(name):
        return EnvironmentLocation(id=name, version="0", factory=name, interpreter="")
    known: list[str] = []
    hints: list[str] = []
    for locator in locators():
        location = locator.locate(name)
        if location is not None:
            return location
        known += locator.known_names()
        hints.append(locator.hint(name))
    advice = " or ".join(hint for hint in hints if hint)
    if advice:
        raise UnknownNameError(f"environment {name!r} is not installed; {advice}")
    raise unknown_name("environment", name, known)


def _names_a_class(name: str) -> bool:
    """Whether `name` is `module:Class`; `corp:toy` is a registry and an environment's name."""
    attribute = name.partition(":")[2]
    return bool(attribute) and not set("/@") & set(name) and not attribute.islower()


def record_environment(name: str, processes: ProcessSettings | None = None) -> EnvironmentRecord:
    """Return which code `name` means now, for the records of a run or an eval."""
    if processes is not None and processes.addresses:
        return elsewhere(name)
    return record_of(locate_environment(name))


def open_environment(
    name: str,
    settings: dict[str, Any] | None = None,
    processes: ProcessSettings | None = None,
) -> EnvironmentClient:
    """Open `name` with its own `settings` (the `--env.x` flags), where `processes` says.

    Worker processes start with the first request.
    """
    processes = processes or ProcessSettings()
    if processes.addresses:
        identity = Identity(name=name, version="")
        return _pool(name, settings or {}, identity, processes, _remote_places(name, processes))
    location = locate_environment(name)
    merged = {**location.config, **(settings or {})}
    if runs_in_process(location, processes.isolation):
        _require_no_effect(name, processes)
        environment = _load_located(location).from_settings(merged)
        return InProcessEnvironment(environment, name=name, version=location.version)
    version = "" if location.version == "0" else location.version
    identity = Identity(name=name, version=version)
    return _pool(name, merged, identity, processes, _local_places(name, location, processes))


def check_environment(
    name: str, settings: dict[str, Any] | None = None, processes: ProcessSettings | None = None
) -> None:
    """Raise what would keep `name` from being opened with `settings`.

    Starts a process only where this one cannot import the environment; outside an event loop.
    Writes nothing: a worker's log goes to a temporary file.
    """
    if processes is not None:
        processes = replace(processes, log_folder=None)
    opened = open_environment(name, settings, processes)
    if isinstance(opened, InProcessEnvironment) or (processes and processes.addresses):
        return
    location = locate_environment(name)
    if location.interpreter in ("", sys.executable):
        _load_located(location).from_settings({**location.config, **(settings or {})})
    else:
        asyncio.run(_described(opened))


async def _described(client: EnvironmentClient) -> None:
    try:
        await client.describe()
    finally:
        await client.close()


def _require_no_effect(name: str, processes: ProcessSettings) -> None:
    if processes.num_workers > 1 or processes.memory_limit_bytes is not None:
        raise ConfigError(
            f"{name!r} is played in this process, where a number of workers and a memory limit "
            "have no effect; add --env-isolation process, or leave them out"
        )


def runs_in_process(location: EnvironmentLocation, isolation: Isolation) -> bool:
    """Return whether the environment at `location` runs in this process."""
    is_importable = location.interpreter in ("", sys.executable)
    if isolation is Isolation.NONE and not is_importable:
        raise ConfigError(
            f"environment {location.id!r} is installed in a virtual environment of its own, which "
            "this process cannot import; leave isolation at auto"
        )
    is_installed = bool(location.interpreter)
    return isolation is Isolation.NONE or (isolation is Isolation.AUTO and not is_installed)


def _pool(
    name: str,
    settings: dict[str, Any],
    identity: Identity,
    processes: ProcessSettings,
    places: Sequence[Place],
) -> EnvironmentPool:
    return EnvironmentPool(name, places, settings, identity=identity, processes=processes)


def _local_places(
    name: str, location: EnvironmentLocation, processes: ProcessSettings
) -> list[LocalPlace]:
    folder = processes.log_folder
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return [
        LocalPlace(
            label=f"environment process {index} of {name}",
            environment=name,
            factory=location.factory,
            interpreter=location.interpreter or sys.executable,
            search_path=location.search_path,
            version=location.version if location.search_path else "",
            memory_limit_bytes=processes.memory_limit_bytes,
            log_path=folder / f"environment-{plain}-{index}.log" if folder else None,
        )
        for index in range(processes.num_workers)
    ]


def _remote_places(name: str, processes: ProcessSettings) -> list[RemotePlace]:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"workers at {', '.join(processes.addresses)} ask for a token; set {TOKEN_VARIABLE} to "
            "the one they were started with"
        )
    return [
        RemotePlace(label=f"worker of {name} at {address}", address=address, token=token)
        for address in processes.addresses
    ]


def _load_located(location: EnvironmentLocation) -> type[Environment]:
    """Import a class that this interpreter can import, from its own folders first."""
    use_search_path(location.search_path)
    found = load_environment_class(location.factory)
    _require_from(found, location)
    return found


def use_search_path(folders: Sequence[str]) -> None:
    """Let this process, and those it starts, import from `folders` before all others."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _require_from(found: type[Environment], location: EnvironmentLocation) -> None:
    """Raise when this process had imported the same module from another place before."""
    file = getattr(sys.modules[found.__module__], "__file__", None) or ""
    folders = location.search_path
    if folders and not any(Path(file).is_relative_to(folder) for folder in folders):
        raise EnvironmentLoadError(
            f"{location.id} is linked to {folders[0]}, but this process has imported {file} "
            "before; use one of the two in a process"
        )


def load_environment_class(factory: str) -> type[Environment]:
    """Import `module:Class`; raises EnvironmentLoadError saying what is wrong with it."""
    module_name, _, class_name = factory.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvironmentLoadError(
            f"cannot import environment {factory!r}: {error}; "
            "reinstall it, or install what it misses"
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        classes = [name for name, member in vars(module).items() if isinstance(member, type)]
        meant = nearest(class_name, classes)
        advice = f"; did you mean {' or '.join(meant)}?" if meant else ""
        raise EnvironmentLoadError(
            f"{factory!r} is not an Environment class; expected `module:Class`, got {found!r}"
            f"{advice}"
        )
    return found
