"""The metrics of a run as columns, which grow with `metrics.jsonl`."""

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from telescope_core.base.errors import unknown_name
from telescope_core.records.files import is_of_step
from telescope_ui.base.answers import NotThereError
from telescope_ui.files.json_lines import NewRows

MAX_NAMES = 5000
"""Most metrics of a run; further names are left out."""
MAX_VALUES = 2**25
"""Most values: steps times metrics; further steps are left out."""
_IDENTITY = ("step",)
_LARGEST = 1e150


class Columns(NamedTuple):
    """Metrics over the same steps, which grow; a missing value is NaN."""

    steps: "array[int]"
    values: "dict[str, array[float]]"


class MetricsTable:
    """The columns of one `metrics.jsonl`; any thread may ask."""

    def __init__(self, run: Path, name: str = "metrics.jsonl") -> None:
        """Read the file `name` of the resolved folder `run`."""
        self._name = name
        self._new = NewRows(run, name, dict[str, Any], is_row=is_of_step)
        self._lock = Lock()
        self._steps: array[int] = array("q")
        self._columns: dict[str, array[float]] = {}
        self._num_cut = 0
        """Number of steps that are left out."""

    def problems(self) -> list[str]:
        """Return what is left out of the file, each as a sentence."""
        with self._lock:
            self._refresh()
            found = self._new.problems
            if self._num_cut:
                found.append(
                    f"{self._name} has {self._num_cut:,} further steps, which are left out: at "
                    f"most {MAX_VALUES:,} values of all metrics are kept"
                )
            return found

    def names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        with self._lock:
            self._refresh()
            return sorted(self._columns)

    def last_step(self) -> int:
        """Return the newest step; 0 = there is none."""
        with self._lock:
            self._refresh()
            return max(self._steps, default=0)

    def columns(
        self, names: Sequence[str], *, first: int | None = None, last: int | None = None
    ) -> Columns:
        """Return copies of the metrics `names` from step `first` to `last`, both included.

        Of several rows of a step, the last one counts. Raises NotThereError for a name that no
        step has.
        """
        with self._lock:
            self._refresh()
            for name in names:
                if name not in self._columns:
                    raise NotThereError(str(unknown_name("metric", name, list(self._columns))))
                _fill(self._columns[name], len(self._steps))
            newest = {step: at for at, step in enumerate(self._steps)}
            kept = [
                newest[step]
                for step in sorted(newest)
                if (first is None or step >= first) and (last is None or step <= last)
            ]
            if kept == list(range(len(self._steps))):
                return Columns(self._steps[:], {name: self._columns[name][:] for name in names})
            return Columns(
                array("q", [self._steps[at] for at in kept]),
                {name: array("d", [self._columns[name][at] for at in kept]) for name in names},
            )

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        with self._lock:
            self._refresh()
            column = self._columns.get(name, array("d"))
            return next((value for value in reversed(column) if not math.isnan(value)), None)

    def _refresh(self) -> None:
        if self._new.is_rewritten():
            self._steps, self._columns, self._num_cut = array("q"), {}, 0
        for row in self._new:
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        num = len(self._steps)
        if (num + 1) * max(1, len(self._columns)) > MAX_VALUES:
            self._num_cut += 1
            return
        for name, value in row.items():
            if name in _IDENTITY or not isinstance(value, int | float | None):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_NAMES:
                    continue
                column = self._columns[name] = array("d")
            _fill(column, num)
            column.append(bounded(value))
        self._steps.append(row["step"])


def _fill(column: "array[float]", num: int) -> None:
    """Append NaN for those of `num` steps that a column lacks."""
    if len(column) < num:
        column.extend(array("d", [math.nan]) * (num - len(column)))


def bounded(value: float | None) -> float:
    """Return a value of a line, of which sums and squares are no larger than floats can be."""
    return math.nan if value is None else float(max(-_LARGEST, min(_LARGEST, value)))
