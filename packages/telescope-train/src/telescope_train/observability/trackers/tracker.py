"""`Tracker`: what a service or a file format has to take; found by `telescope.trackers`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.records.rows import RolloutRow

GROUP = "telescope.trackers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that a tracker is told of."""

    name: str
    folder: Path
    """Of the run; a tracker that writes files does so in a folder of its own there."""
    config: Mapping[str, Any]
    """Every setting, those that may be secrets masked."""
    first_step: int
    """The next step: 1, or one more than a resumed run has done."""
    options: Mapping[str, Any]
    """Settings that are a tracker's own, by name."""


class Tracker(Protocol):
    """Takes what a run tells; all calls come from one thread, which may wait.

    Whatever a method raises ends the tracker, and not the run.
    """

    def begin(self, run: TrackedRun) -> None:
        """Begin, or go on with, the record of a run."""
        ...

    def log_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Take numbers of a step.

        A step may come again, after a run went back, and numbers of an eval after those of later
        steps.
        """
        ...

    def log_gauges(self, time_s: int, row: Mapping[str, float]) -> None:
        """Take what the meters of machines and servers showed in one second.

        `time_s`: seconds since 1970, UTC. They only grow, and belong to no step.
        """
        ...

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Take some rollouts of a step."""
        ...

    def log_files(self, paths: Sequence[Path]) -> None:
        """Take files of the run, such as its logs; they are removed afterwards.

        Files come again, with the same names, when there is more in them. Only called where a
        setting asks for it. What it raises does not end the tracker, which is asked once more at
        the end.
        """
        ...

    def end(self, state: str) -> None:
        """Write what is left; `state` is that of the run."""
        ...


def names_in_use(asked: Mapping[str, bool], others: Sequence[str]) -> list[str]:
    """Return the trackers that a setting of their own asks for, then `others`, each once."""
    return list(dict.fromkeys([*(name for name, is_on in asked.items() if is_on), *others]))


def load_tracker(name: str) -> Tracker:
    """Return a new tracker; raises ConfigError if it or what it needs is not installed."""
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
