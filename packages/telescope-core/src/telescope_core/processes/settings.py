"""Settings of an environment's worker processes: their number, memory limit and deadlines."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from telescope_core.base.addresses import without_brackets
from telescope_core.base.errors import ConfigError

TOKEN_VARIABLE = "TELESCOPE_WORKER_TOKEN"
"""Environment variable with the secret that authenticates a host to workers over TCP."""


LOG_VARIABLE = "TELESCOPE_WORKER_LOG"
"""Environment variable with the settings of a worker's log, as JSON."""


class Isolation(StrEnum):
    """The process in which an environment runs."""

    AUTO = "auto"
    """Separate processes, except for a class of the running script, which other processes lack."""
    PROCESS = "process"
    """Separate processes."""
    NONE = "none"
    """This process, on its event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeadlines:
    """Seconds that each stage of a worker's life may take. A rollout's deadline is in its request.

    Starting, loading and scoring may take any time while the worker reads, writes or keeps ever
    more, and does nothing else: their seconds are those without any of it. A worker that misses a
    deadline is ended and replaced, because its state is no longer known.
    """

    start_s: float = 120.0
    """Seconds without a sign of work until the greeting: while a cluster makes room for the worker
    and starts it, and while modules are imported."""
    greeting_s: float = 10.0
    """Seconds until the greeting of a worker that was started separately: it listens when it has
    imported everything."""
    load_s: float = 600.0
    """Seconds without a sign of work while the environment is built, loads data or is described."""
    score_s: float = 300.0
    """The same while group rewards are applied or a gold answer is scored."""
    grace_s: float = 15.0
    """Seconds in addition to a rollout's deadline, for its cleanup and for sending the result."""
    cancel_s: float = 10.0
    """Seconds for a cancelled rollout to end; its model request ends at once."""
    close_s: float = 5.0
    """Seconds for a worker to end by itself."""
    hang_s: float = 60.0
    """Seconds for which an event loop may be blocked or a process may send nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of the workers of one environment."""

    isolation: Isolation = Isolation.AUTO
    num_workers: int = 1
    addresses: tuple[str, ...] = ()
    """`host:port` of workers that run elsewhere; when given, no worker is started here."""
    memory_limit_bytes: int | None = None
    """Most memory of one worker in bytes; None = no limit."""
    log_folder: Path | None = None
    """Folder for the output of workers; None = temporary files that are deleted with them."""
    log_name: str = ""
    """Name of the environment in logs; empty = the name that it is opened with. Workers with the
    same name in the same folder would write to the same files."""
    is_debug: bool = False
    """Whether debug messages are logged too."""
    hide: frozenset[str] = field(default=frozenset(), repr=False)
    """Values of secrets that are removed from logs of workers' output."""
    asks_models: bool = True
    """Whether the environment may ask judges and simulated users."""
    max_restarts: int = 5
    """Most restarts in a row without a finished rollout in between; then the worker is given up."""
    max_stuck_threads: int = 16
    """Most threads lost to code that does not end; a worker with more is replaced."""
    deadlines: StageDeadlines = field(default_factory=StageDeadlines)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"env_workers must be at least 1, got {self.num_workers}")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 64 * 2**20:
            raise ConfigError(
                f"the memory limit of a worker must be at least 64 MiB, got "
                f"{self.memory_limit_bytes} bytes; an idle worker needs about 40 MiB"
            )
        for address in self.addresses:
            split_address(address)
        if self.addresses and self.isolation is Isolation.NONE:
            raise ConfigError(
                "isolation 'none' plays in this process, but worker addresses were given; "
                "remove either setting"
            )


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port in `host:port`; raises ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    host = without_brackets(host)
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigError(
            f"a worker's address must be host:port such as 10.0.0.5:7000, got {address!r}"
        )
    return host, int(port)
