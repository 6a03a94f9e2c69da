"""`Course`: steps and reward of a run for lists of runs, without its other metrics."""

from array import array
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import msgspec

from telescope_core.records.files import is_of_step
from telescope_core.reports.verdict import REWARDS
from telescope_ui.files.json_lines import NewRows
from telescope_ui.index.metrics_table import bounded


class _Line(msgspec.Struct):
    """The part of a line of metrics for lists; decoding skips everything else."""

    step: object = None
    task_reward: object = msgspec.field(default=None, name=REWARDS[0])
    reward: object = msgspec.field(default=None, name=REWARDS[1])
    accuracy: object = msgspec.field(default=None, name=REWARDS[2])


class Reward(NamedTuple):
    """The reward of a run; a step without one is left out."""

    steps: "array[int]"
    values: "array[float]"


class Course:
    """The course of one `metrics.jsonl`; any thread may ask."""

    def __init__(self, run: Path) -> None:
        """Read the metrics of the resolved folder `run`."""
        self._new = NewRows(run, "metrics.jsonl", _Line)
        self._lock = Lock()
        self._last_step = 0
        self._found = tuple(Reward(array("q"), array("d")) for _ in REWARDS)

    def last_step(self) -> int:
        """Return the newest step; 0 = there is none."""
        with self._lock:
            self._refresh()
            return self._last_step

    def reward(self) -> Reward:
        """Return a copy of the reward over steps, which grow; empty if no step has one."""
        with self._lock:
            self._refresh()
            steps, values = next((one for one in self._found if one.steps), self._found[0])
            newest = dict(zip(steps, values, strict=True))
            grown = sorted(newest)
            return Reward(array("q", grown), array("d", [newest[step] for step in grown]))

    def _refresh(self) -> None:
        if self._new.is_rewritten():
            self._last_step = 0
            self._found = tuple(Reward(array("q"), array("d")) for _ in REWARDS)
        for line in self._new:
            if not isinstance(line.step, int) or not is_of_step({"step": line.step}):
                continue
            self._last_step = max(self._last_step, line.step)
            measured = (line.task_reward, line.reward, line.accuracy)
            for known, value in zip(self._found, measured, strict=True):
                if isinstance(value, int | float):
                    known.steps.append(line.step)
                    known.values.append(bounded(value))
