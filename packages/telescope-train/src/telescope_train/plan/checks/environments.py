"""Check the settings of environment processes: which fit together, and which have no effect."""

from collections.abc import Iterator

from telescope_core.base.errors import ConfigError
from telescope_core.processes.settings import split_address
from telescope_train.config.fields import unused
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig
from telescope_train.rollouts.environments import starts_processes


def process_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem with the places of environment processes."""
    section = config.rollout
    started = [
        entry
        for entry in (*config.environments, *config.evals.evals)
        if starts_processes(entry, section.env_isolation)
    ]
    if not started:
        for field in ("env_workers", "env_memory_limit_mb"):
            why = (
                "because no environment of this run starts a process here; set env_isolation = "
                f"'process', or remove {field}"
            )
            yield from unused(section, f"rollout.{field}", why)
    for kind, entries in (("environments", config.environments), ("evals", config.evals.evals)):
        for index, entry in enumerate(entries):
            yield from _entry_problems(entry, f"{kind}[{index}] ({entry.name})", config)


def _entry_problems(
    entry: EnvironmentEntry | EvalEntry, where: str, config: TrainConfig
) -> Iterator[str]:
    isolation = config.rollout.env_isolation
    for address in entry.env_addresses:
        try:
            split_address(address)
        except ConfigError as error:
            yield f"{where}: {error}"
    if entry.env_addresses and isolation == "none":
        yield (
            f"{where}: env_addresses has no effect with env_isolation = 'none'; remove one of them"
        )
    if isinstance(entry, EnvironmentEntry) and not starts_processes(entry, isolation):
        yield from unused(
            entry,
            f"{where}: env_workers",
            "because the environment starts no process here; set env_isolation = 'process', or "
            "remove env_workers (and env_addresses, if it has any)",
            holds=(config.rollout.env_workers,),
        )
