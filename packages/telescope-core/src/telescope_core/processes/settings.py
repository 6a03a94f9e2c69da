"""How an environment's worker processes are run: how many, how large, how long they may take."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from telescope_core.errors import ConfigError

TOKEN_VARIABLE = "TELESCOPE_WORKER_TOKEN"
"""Holds the secret that a host shows to workers it reaches over TCP."""


class Isolation(StrEnum):
    """Where an environment runs."""

    AUTO = "auto"
    """Installed environments in processes of their own, `module:Class` in this one."""
    PROCESS = "process"
    """In processes of its own."""
    NONE = "none"
    """In this process, on its event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeadlines:
    """Seconds each stage of a worker's life may take. A rollout's own deadline is in its request.

    A worker that misses one is ended and replaced, since what it does is not known any more.
    """

    start_s: float = 120.0
    """From the start of the process to its greeting, imports included."""
    load_s: float = 600.0
    """To build the environment, to load its data and to describe it."""
    score_s: float = 300.0
    """To apply the group rewards, or to score a gold answer."""
    grace_s: float = 15.0
    """Beyond a rollout's own deadline, for its cleanup and the way back."""
    cancel_s: float = 10.0
    """For a cancelled rollout to end; its model request ends at once."""
    close_s: float = 5.0
    """For a worker to end by itself."""
    hang_s: float = 60.0
    """That an event loop may stand still, or a process say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How the workers of one environment are run."""

    isolation: Isolation = Isolation.AUTO
    num_workers: int = 1
    addresses: tuple[str, ...] = ()
    """`host:port` of workers that run elsewhere; none is started here then."""
    memory_limit_bytes: int | None = None
    """Memory of one worker; None = what the machine has."""
    log_folder: Path | None = None
    """Where workers' output goes; None = a temporary file for as long as they live."""
    max_restarts: int = 5
    """Deaths in a row, without a finished rollout between them, before a worker is given up."""
    max_stuck_threads: int = 16
    """Threads lost to code that does not end, before a worker is replaced."""
    deadlines: StageDeadlines = field(default_factory=StageDeadlines)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"env_workers must be at least 1, got {self.num_workers}")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 64 * 2**20:
            raise ConfigError(
                f"the memory limit of a worker must be at least 64 MiB, got "
                f"{self.memory_limit_bytes} bytes; an idle one needs about 40 MiB"
            )
        for address in self.addresses:
            split_address(address)
        if self.addresses and self.isolation is Isolation.NONE:
            raise ConfigError(
                "isolation 'none' plays in this process, but worker addresses were given; "
                "remove one of the two"
            )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`; raises ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigError(
            f"a worker's address must be host:port such as 10.0.0.5:7000, got {address!r}"
        )
    return host, int(port)
