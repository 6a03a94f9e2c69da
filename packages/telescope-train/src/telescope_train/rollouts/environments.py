"""The environments of a run: their places, and one client per name and settings.

An eval of an environment that is also trained on shares its client, and with it the worker
processes. `prepare_environments` looks up once where each environment is on this machine.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from telescope_core.base.environment_record import EnvironmentRecord, elsewhere, record_of
from telescope_core.base.errors import TelescopeError
from telescope_core.base.interruptible import run
from telescope_core.base.protocols import EnvironmentClient, EnvironmentLocation
from telescope_core.base.secret_names import secret_values
from telescope_core.finding.locate import locate_environment
from telescope_core.open import check_workers, open_environment, plays_here, runs_in_process
from telescope_core.processes import EnvironmentPool, Isolation, ProcessSettings
from telescope_train.cluster.environment_places import ClusterPlace, EnvironmentPlaces
from telescope_train.config.run_folder import run_folder
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig
from telescope_train.observability.terminal import print_secrets

Entry = EnvironmentEntry | EvalEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEnvironment:
    """One environment of a run, on this machine or elsewhere."""

    entry: Entry
    """The first entry with this name and these settings."""
    processes: ProcessSettings
    location: EnvironmentLocation | None
    """None if workers on other machines play it."""
    record: EnvironmentRecord
    """Record of its code, read when it was found because its files may change during the run."""
    on_cluster: EnvironmentPlaces | None = None
    """Places of its workers on the cluster; None = they are started on this machine."""

    def open(self) -> EnvironmentClient:
        """Return a client; worker processes start with its first request."""
        return open_environment(
            self.entry.name,
            dict(self.entry.env),
            self.processes,
            location=self.location,
            places=self._places(),
        )

    def _places(self) -> Sequence[ClusterPlace] | None:
        location = self.location
        if self.on_cluster is None or location is None:
            return None
        if runs_in_process(location, self.processes.isolation):
            return None
        return self.on_cluster.of(self.entry.name, self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEnvironments:
    """Clients by the names of their entries; `clients` holds each once."""

    training: Mapping[str, EnvironmentClient]
    evals: Mapping[str, EnvironmentClient]
    clients: tuple[EnvironmentClient, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironments:
    """The environments of a run, located once before anything is started."""

    found: tuple[FoundEnvironment, ...]
    opened: OpenedEnvironments
    """Environments that can be opened."""
    problems: tuple[str, ...]
    """Reasons why others cannot."""
    secrets: Mapping[str, tuple[str, ...]]
    """Name -> secrets that it may read and gets from this machine, if there are any."""
    on_cluster: EnvironmentPlaces | None = None
    """Places of workers on the cluster; None = all are started on this machine."""

    @property
    def records(self) -> dict[str, EnvironmentRecord]:
        """The record of each environment's code, by the names of entries."""
        return records_of(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """The place of one environment."""

    count: int
    """Number of processes that are started for it here."""
    detail: str


def prepare_environments(config: TrainConfig) -> RunEnvironments:
    """Locate, open and check every environment for training or evals; outside an event loop.

    No error is raised, and no process is left running. All checks of one run start at once. The
    variables that an environment may read are printed before it starts.
    """
    on_cluster = None
    if config.ray.ray_environment_placement != "driver":
        on_cluster = EnvironmentPlaces()
    found, problems = find_environments(config, on_cluster)
    clients: dict[str, EnvironmentClient] = {}
    for one in found:
        try:
            clients[_key(one.entry)] = one.open()
        except TelescopeError as error:
            problems.append(str(error))
    checked = run(_check([one for one in found if _key(one.entry) in clients], clients))
    for one in found:
        client = clients.get(_key(one.entry))
        if one.location is not None and isinstance(client, EnvironmentPool):
            client.agreement.settle(checked.secrets.get(one.entry.name, ()))
    return RunEnvironments(
        found=tuple(found),
        opened=_by_entry(config, clients),
        problems=(*problems, *checked.problems),
        secrets=checked.secrets,
        on_cluster=on_cluster,
    )


def records_of(found: Iterable[FoundEnvironment]) -> dict[str, EnvironmentRecord]:
    """Return the record of each environment's code, by the names of entries."""
    records: dict[str, EnvironmentRecord] = {}
    for one in found:
        records.setdefault(one.entry.name, one.record)
    return records


def find_environments(
    config: TrainConfig, on_cluster: EnvironmentPlaces | None = None
) -> tuple[list[FoundEnvironment], list[str]]:
    """Return environments that are installed, importable or elsewhere, and errors of others."""
    found: list[FoundEnvironment] = []
    problems: list[str] = []
    for entry in _distinct(config):
        try:
            location = None if entry.env_addresses else locate_environment(entry.name)
        except TelescopeError as error:
            problems.append(str(error))
            continue
        is_first = all(one.entry.name != entry.name for one in found)
        log_name = entry.name if is_first else f"{entry.name} eval"
        processes = replace(process_settings(entry, config), log_name=log_name)
        found.append(
            FoundEnvironment(
                entry=entry,
                processes=processes,
                location=location,
                record=elsewhere(entry.name)
                if location is None
                else record_of(location, entry.env),
                on_cluster=on_cluster,
            )
        )
    return found, problems


class _Checked(NamedTuple):
    problems: list[str]
    """Reasons why worker processes cannot play them."""
    secrets: dict[str, tuple[str, ...]]
    """Secrets that each may read, if there are any."""


async def _check(
    found: Sequence[FoundEnvironment], clients: Mapping[str, EnvironmentClient]
) -> _Checked:
    checks = (
        check_workers(
            clients[_key(one.entry)],
            dict(one.entry.env),
            one.processes,
            one.location,
            tell=print_secrets,
        )
        for one in found
    )
    checked = _Checked([], {})
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    for one, outcome in zip(found, outcomes, strict=True):
        if isinstance(outcome, TelescopeError):
            checked.problems.append(str(outcome))
        elif isinstance(outcome, BaseException):
            raise outcome
        elif outcome:
            before = checked.secrets.get(one.entry.name, ())
            checked.secrets[one.entry.name] = tuple(sorted({*before, *outcome}))
    return checked


def _by_entry(config: TrainConfig, clients: Mapping[str, EnvironmentClient]) -> OpenedEnvironments:
    def named(entries: Iterable[Entry]) -> dict[str, EnvironmentClient]:
        return {one.name: clients[_key(one)] for one in entries if _key(one) in clients}

    return OpenedEnvironments(
        training=named(config.environments),
        evals=named(config.evals.evals),
        clients=tuple(clients.values()),
    )


def process_settings(entry: Entry, config: TrainConfig) -> ProcessSettings:
    """Return the process settings of `entry`."""
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
        # A worker on another node starts in another folder.
        log_folder=(run_folder(config) / "logs").absolute(),
        is_debug=config.writes_debug,
        hide=frozenset(secret_values(entry.env)),
    )


def starts_processes(entry: Entry, isolation: str) -> bool:
    """Return whether processes are started here for `entry`."""
    return not entry.env_addresses and not plays_here(entry.name, Isolation(isolation))


def worker_plans(found: Iterable[FoundEnvironment]) -> Iterator[WorkerPlan]:
    """Yield the place of each environment; nothing for those that the settings rule out."""
    for one in found:
        try:
            yield _worker_plan(one)
        except TelescopeError:
            continue  # a problem of the plan, told there


def _worker_plan(found: FoundEnvironment) -> WorkerPlan:
    name, settings, location = found.entry.name, found.processes, found.location
    if location is None:
        where = f"started at {', '.join(settings.addresses)}"
        return WorkerPlan(count=0, detail=f"plays {name}: {where}")
    if runs_in_process(location, settings.isolation):
        return WorkerPlan(count=0, detail=f"plays {name}: in the driver")
    is_shared = location.interpreter in ("", sys.executable)
    where = "in the driver's interpreter" if is_shared else "in a virtual environment of its own"
    if found.on_cluster is not None:
        where = "on nodes of the cluster"
    limit = settings.memory_limit_bytes
    size = f", at most {limit // 2**20} MiB each" if limit else ""
    return WorkerPlan(count=settings.num_workers, detail=f"plays {name}: {where}{size}")


def _distinct(config: TrainConfig) -> list[Entry]:
    entries: tuple[Entry, ...] = (*config.environments, *config.evals.evals)
    found: dict[str, Entry] = {}
    for entry in entries:
        found.setdefault(_key(entry), entry)
    return list(found.values())


def _key(entry: Entry) -> str:
    return json.dumps([entry.name, entry.env, entry.env_addresses], sort_keys=True)
