"""`Tracker`: the interface of a service or a file format; found by `telescope.trackers`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.records.rows import RolloutRow

GROUP = "telescope.trackers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A description of the run for trackers."""

    name: str
    folder: Path
    """Folder of the run, in which a tracker may create a folder for its files."""
    config: Mapping[str, Any]
    """All settings, with possible secrets masked."""
    first_step: int
    """Number of the next step: 1, or one more than a resumed run has taken."""
    options: Mapping[str, Any]
    """Settings of the tracker itself, by name."""


class Tracker(Protocol):
    """Receives the records of a run; all calls come from one thread, which may wait.

    An error of a method ends the tracker, but not the run.
    """

    def begin(self, run: TrackedRun) -> None:
        """Start, or continue, the record of a run."""
        ...

    def log_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Record numbers of a step.

        A step may be recorded again after a run went back, and numbers of an eval after those of
        later steps.
        """
        ...

    def log_gauges(self, time_s: int, row: Mapping[str, float]) -> None:
        """Record the readings of all meters in one second.

        `time_s`: seconds since 1970, UTC. They only grow, and belong to no step.
        """
        ...

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Record some rollouts of a step."""
        ...

    def log_files(self, paths: Sequence[Path]) -> None:
        """Record files of the run, such as its logs; they are removed afterwards.

        The same files are recorded again when they have grown. Only called if a setting asks for
        it. An error does not end the tracker, which is called once more at the end.
        """
        ...

    def end(self, state: str) -> None:
        """Write the rest; `state` is that of the run."""
        ...


class _AsksForTrackers(Protocol):
    """Settings that choose trackers."""

    @property
    def use_wandb(self) -> bool: ...
    @property
    def use_tensorboard(self) -> bool: ...
    @property
    def trackers(self) -> tuple[str, ...]: ...


def names_in_use(section: _AsksForTrackers) -> list[str]:
    """Return the names of the trackers that `section` asks for, each once."""
    asked = {"wandb": section.use_wandb, "tensorboard": section.use_tensorboard}
    names = (name for name, is_on in asked.items() if is_on)
    return list(dict.fromkeys([*names, *section.trackers]))


def missing_trackers(section: _AsksForTrackers) -> Iterator[str]:
    """Yield a message for each tracker that `section` asks for and that is not installed."""
    for name in names_in_use(section):
        try:
            load_tracker(name)
        except ConfigError as error:
            yield str(error)


def load_tracker(name: str) -> Tracker:
    """Return a new tracker; raises ConfigError if it or one of its packages is not installed."""
    found = {one.name: one for one in entry_points(group=GROUP)}
    if name not in found:
        raise unknown_name("tracker", name, found)
    try:
        return found[name].load()()
    except ImportError as error:
        raise ConfigError(
            f"the tracker {name} needs {error.name or error}, which is not installed; "
            f"run: pip install 'telescope-train[{name}]'"
        ) from None
