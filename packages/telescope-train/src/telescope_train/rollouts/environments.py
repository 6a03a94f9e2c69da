"""The environments of a run: where each runs, and one client per name and settings.

An eval of what is also trained on shares the client, and with it the worker processes.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from telescope_core.environment_record import EnvironmentRecord
from telescope_core.errors import TelescopeError
from telescope_core.locate import locate_environment
from telescope_core.open import (
    check_environment,
    open_environment,
    record_environment,
    runs_in_process,
)
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.protocols import EnvironmentClient
from telescope_train.config.run_folder import run_folder
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig

Entry = EnvironmentEntry | EvalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEnvironments:
    """Clients by the names of their entries; `clients` holds each once."""

    training: Mapping[str, EnvironmentClient]
    evals: Mapping[str, EnvironmentClient]
    clients: tuple[EnvironmentClient, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """Where one environment will run."""

    count: int
    """Processes that are started for it here."""
    detail: str


def process_settings(entry: Entry, config: TrainConfig) -> ProcessSettings:
    """Return how the processes of `entry` are run."""
    rollout = config.rollout
    isolation = Isolation(rollout.env_isolation)
    if not starts_processes(entry, rollout.env_isolation):
        return ProcessSettings(isolation=isolation, addresses=entry.env_addresses)
    own = entry.env_workers if isinstance(entry, EnvironmentEntry) else None
    limit_mb = rollout.env_memory_limit_mb
    return ProcessSettings(
        isolation=isolation,
        num_workers=own or rollout.env_workers,
        memory_limit_bytes=None if limit_mb is None else limit_mb * 2**20,
        log_folder=run_folder(config) / "logs",
    )


def open_environments(config: TrainConfig) -> OpenedEnvironments:
    """Open everything that is trained on or evaluated; processes start with the first request."""
    opened: dict[str, EnvironmentClient] = {}

    def client_of(entry: Entry) -> EnvironmentClient:
        key = _key(entry)
        if key not in opened:
            settings = process_settings(entry, config)
            opened[key] = open_environment(entry.name, dict(entry.env), settings)
        return opened[key]

    training = {entry.name: client_of(entry) for entry in config.environments}
    evals = {entry.name: client_of(entry) for entry in config.evals.evals}
    return OpenedEnvironments(training=training, evals=evals, clients=tuple(opened.values()))


def environment_records(config: TrainConfig) -> dict[str, EnvironmentRecord]:
    """Return which code each environment is, trained on or evaluated, by the names of entries.

    What cannot be found is left out: it is a problem of the plan, told there.
    """
    records: dict[str, EnvironmentRecord] = {}
    for entry in _distinct(config):
        with suppress(TelescopeError):
            records.setdefault(
                entry.name, record_environment(entry.name, process_settings(entry, config))
            )
    return records


def environment_problems(config: TrainConfig) -> Iterator[str]:
    """Yield why an environment, trained on or evaluated, could not be opened."""
    for entry in _distinct(config):
        try:
            settings = process_settings(entry, config)
            check_environment(entry.name, dict(entry.env), settings)
        except TelescopeError as error:
            yield str(error)


def worker_plans(config: TrainConfig) -> Iterator[WorkerPlan]:
    """Yield where each environment runs; nothing for those that are not installed."""
    for entry in _distinct(config):
        try:
            yield _worker_plan(entry, process_settings(entry, config))
        except TelescopeError:
            continue  # a problem of the plan, told there


def _worker_plan(entry: Entry, settings: ProcessSettings) -> WorkerPlan:
    if settings.addresses:
        where = f"started at {', '.join(settings.addresses)}"
        return WorkerPlan(count=0, detail=f"plays {entry.name}: {where}")
    location = locate_environment(entry.name)
    if runs_in_process(location, settings.isolation):
        return WorkerPlan(count=0, detail=f"plays {entry.name}: in the driver")
    is_shared = location.interpreter in ("", sys.executable)
    where = "in the driver's interpreter" if is_shared else "in a virtual environment of its own"
    limit = settings.memory_limit_bytes
    size = f", at most {limit // 2**20} MiB each" if limit else ""
    return WorkerPlan(count=settings.num_workers, detail=f"plays {entry.name}: {where}{size}")


def _distinct(config: TrainConfig) -> list[Entry]:
    entries: tuple[Entry, ...] = (*config.environments, *config.evals.evals)
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(_key(entry), entry)
    return list(found.values())


def _key(entry: Entry) -> str:
    return json.dumps([entry.name, entry.env, entry.env_addresses], sort_keys=True)


def starts_processes(entry: EnvironmentEntry | EvalEntry, isolation: str) -> bool:
    """Return whether processes are started here for `entry`."""
    is_importable_code = ":" in entry.name and not set("/@") & set(entry.name)
    is_in_driver = isolation == "none" or (isolation == "auto" and is_importable_code)
    return not entry.env_addresses and not is_in_driver
