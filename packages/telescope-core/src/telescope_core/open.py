"""Open an environment by name as an `EnvironmentClient`: locate, then load it or start workers.

Names: an installed id (`math-reasoning`, `owner/name`, with optional `@version`), or
`module:Class` for code that is importable as it is.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from telescope_core.base.environment_record import EnvironmentRecord, elsewhere, record_of
from telescope_core.base.errors import ConfigError
from telescope_core.base.protocols import EnvironmentClient, EnvironmentLocation
from telescope_core.base.secret_names import secret_values
from telescope_core.environments.running import HoldWatch
from telescope_core.finding.locate import load_located, locate_environment
from telescope_core.finding.schemes import adapted
from telescope_core.playing.in_process import InProcessEnvironment
from telescope_core.processes import (
    TOKEN_VARIABLE,
    EnvironmentPool,
    Isolation,
    LocalPlace,
    ProcessSettings,
    RemotePlace,
)
from telescope_core.processes.handshake import Identity
from telescope_core.processes.launch import WorkerPlace
from telescope_core.records.logs import log_name
from telescope_core.records.output_logs import ENVIRONMENT_OUTPUT


def record_environment(
    name: str,
    processes: ProcessSettings | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
) -> EnvironmentRecord:
    """Return the record of the code that `name` means now, for a run or an eval.

    `settings`: its own, whose files belong to it.
    """
    if processes is not None and processes.addresses:
        return elsewhere(name)
    return record_of(locate_environment(name), settings)


def open_environment(
    name: str,
    settings: dict[str, Any] | None = None,
    processes: ProcessSettings | None = None,
    *,
    location: EnvironmentLocation | None = None,
    places: Sequence[WorkerPlace] | None = None,
) -> InProcessEnvironment | EnvironmentPool:
    """Open the environment `name` with its `settings` (the `--env.x` flags), as `processes` says.

    Worker processes start with the first request. `location` is where the environment is, for
    callers that have located it. `places`: where its workers are started, if it has any; None = on
    this machine.
    """
    given = cast(object, name)
    if not isinstance(given, str):
        one = given if isinstance(given, type) else type(given)
        raise ConfigError(
            "open_environment takes a name, or a file and a class such as './sums.py:Sums', got "
            f"{given!r:.80}; for an environment of your own program write "
            f"InProcessEnvironment({one.__name__}(), name=...), of telescope_core.in_process"
        )
    processes = processes or ProcessSettings()
    if processes.addresses:
        identity = Identity(name=name, version="")
        remote = _remote_places(name, processes)
        return EnvironmentPool(name, remote, settings or {}, identity=identity, processes=processes)
    location = location or locate_environment(name)
    # Whoever linked it said that it needs them, and it meets their absence once it is paid for.
    is_linked = adapted(location.id) is not None
    if is_linked and (unset := [one for one in location.secrets or () if not os.environ.get(one)]):
        raise ConfigError(
            f"{name} was linked with --secret {', '.join(unset)}, which this process does not "
            "have; set it, or link the environment again without it"
        )
    merged = {**location.config, **(settings or {})}
    if runs_in_process(location, processes.isolation):
        if processes.num_workers > 1 or processes.memory_limit_bytes is not None:
            raise ConfigError(
                f"{name!r} is played in this process, where a number of workers and a memory limit "
                "have no effect; add --env-isolation process, or leave them out"
            )
        environment = load_located(location).from_settings(merged)
        return InProcessEnvironment(
            environment,
            name=name,
            version=location.version,
            hold_watch=HoldWatch(),
            asks_models=processes.asks_models,
        )
    if _is_of_script(location.factory):
        raise ConfigError(
            f"{name!r} is a class of the program or notebook that runs, which no other process can "
            "import; save it in a file and open ./file.py:Class, or leave isolation at auto"
        )
    version = "" if location.version == "0" else location.version
    identity = Identity(name=name, version=version)
    if places is None:
        count = range(processes.num_workers)
        processes = replace(processes, hide=processes.hide | secret_values(merged))
        places = [local_place(name, location, processes, index) for index in count]
    return EnvironmentPool(
        name, places, merged, identity=identity, processes=processes, secrets=location.secrets
    )


async def check_workers(
    client: EnvironmentClient,
    settings: dict[str, Any],
    processes: ProcessSettings,
    location: EnvironmentLocation | None,
    *,
    tell: Callable[[str, tuple[str, ...]], None] = lambda name, secrets: None,
) -> tuple[str, ...]:
    """Raise an error that would keep this machine's workers from playing an opened environment.

    Returns the secrets that they may read; empty if the environment runs elsewhere, because it gets
    none from here. `tell` is called with its name and the secrets, before they are read. Starts a
    worker, unless the environment runs in this process, and leaves no files: its log is temporary.
    """
    if location is None:
        return ()
    trial = client
    if not isinstance(client, InProcessEnvironment):
        silent = replace(processes, log_folder=None, num_workers=1)
        trial = open_environment(client.name, settings, silent, location=location)
    assert isinstance(trial, InProcessEnvironment | EnvironmentPool), "no other kind is opened"
    trial.tell_secrets(partial(tell, client.name))
    try:
        # A worker builds it for this, and loads no data.
        await trial.health()
        return trial.secrets
    finally:
        if trial is not client:
            await trial.close()


def runs_in_process(location: EnvironmentLocation, isolation: Isolation) -> bool:
    """Return whether the environment at `location` runs in this process."""
    is_importable = location.interpreter in ("", sys.executable)
    if isolation is Isolation.NONE and not is_importable:
        raise ConfigError(
            f"environment {location.id!r} is installed in a virtual environment of its own, which "
            "this process cannot import; leave isolation at auto"
        )
    return plays_here(location.factory, isolation)


def plays_here(name: str, isolation: Isolation) -> bool:
    """Return whether the environment called `name`, or with that factory, is played here.

    A worker can import every class but one of the script that runs, which it would run again.
    """
    return isolation is Isolation.NONE or (isolation is Isolation.AUTO and _is_of_script(name))


def _is_of_script(factory: str) -> bool:
    """Return whether `factory` is of the script or the notebook that runs."""
    return factory.startswith("__main__:")


def local_place(
    name: str, location: EnvironmentLocation, processes: ProcessSettings, index: int
) -> LocalPlace:
    """Return the place at which worker `index` of an environment is started on this machine."""
    # A worker knows the version of an installed environment, and must be told that of another.
    is_told = bool(location.search_path) or adapted(location.id) is not None
    return LocalPlace(
        label=f"environment process {index} of {name}",
        environment=name,
        factory=location.factory,
        interpreter=location.interpreter or sys.executable,
        search_path=location.search_path,
        datasets=location.datasets,
        own_variables=(location.secrets or ()) if adapted(location.id) is not None else (),
        version=location.version if is_told else "",
        memory_limit_bytes=processes.memory_limit_bytes,
        log_path=_log_path(processes, f"{processes.log_name or name} {index}"),
        log_source=f"{processes.log_name or name} {index}",
        is_debug=processes.is_debug,
        hide=processes.hide,
    )


def _log_path(processes: ProcessSettings, source: str) -> Path | None:
    if processes.log_folder is None:
        return None
    return processes.log_folder / log_name(ENVIRONMENT_OUTPUT, source)


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
