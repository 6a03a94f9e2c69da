"""`History`: the metrics of a run's steps, and the queries that rules make on them."""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

MOST_IN_WINDOW = 20
"""Most steps in a window; a larger window would hide the change that is looked for."""
LEAST_IN_WINDOW = 3


class Stretch(NamedTuple):
    """Consecutive steps for which the same condition holds."""

    first: int
    last: int
    is_over: bool
    """Whether there are later steps for which it does not hold."""

    def values(self, series: Sequence[tuple[int, float]]) -> list[float]:
        """Return the values of a series in these steps."""
        return [value for step, value in series if self.first <= step <= self.last]


class Change(NamedTuple):
    """The mean of a metric in one window of steps and in a later one."""

    before: float
    after: float
    error: float
    """Standard error of the difference, as if steps were independent."""
    first_step: int
    """First step that is nearer to `after` than to `before`; at the latest, the first one of the
    later window."""
    num_steps: int
    """Steps of each window."""

    @property
    def size(self) -> float:
        """The change: `after` minus `before`."""
        return self.after - self.before

    @property
    def is_sure(self) -> bool:
        """Whether the difference is more than four of its standard errors."""
        return abs(self.size) > 4 * self.error


class History:
    """Columns over the steps of a run, each read once."""

    def __init__(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """`columns`: the values of each metric at `steps`, which grow; NaN = the step has none."""
        self._steps = steps
        self._columns = columns
        self._found: dict[str, list[tuple[int, float]]] = {}
        self.metrics = sorted(columns)

    @staticmethod
    def of_rows(rows: Sequence[Mapping[str, Any]]) -> "History":
        """Return the history of rows of metrics, which may be in any order.

        Of several rows of a step, the last one counts.
        """
        return GrowingHistory(rows).present

    @property
    def last_step(self) -> int:
        """Number of the newest step; 0 before the first."""
        return self._steps[-1] if self._steps else 0

    def parts(self, start: str, end: str = "") -> list[str]:
        """Return the parts of metric names between `start` and `end`.

        Names of environments and evals may have a slash; what is last has none.
        """
        found = [
            name[len(start) : len(name) - len(end)]
            for name in self.metrics
            if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)
        ]
        return [name for name in found if end or "/" not in name]

    @property
    def environments(self) -> list[str]:
        """Names of the environments that gave rewards, sorted."""
        return self.parts("task_reward/", "/mean")

    def named(self, metric: str) -> list[tuple[int, float]]:
        """Return step and value of each step that has the metric as a finite number."""
        if metric not in self._found:
            column = self._columns.get(metric, ())
            pairs = zip(self._steps, column, strict=False)
            self._found[metric] = [(step, value) for step, value in pairs if math.isfinite(value)]
        return self._found[metric]

    def recent(self, metric: str) -> float | None:
        """Return the mean of the metric over the newest window; None if there are too few steps."""
        values = [value for _, value in self.named(metric)]
        window = window_of(len(values))
        return None if len(values) < window else fmean(values[-window:])

    def share(self, part: str, whole: str) -> list[tuple[int, float]]:
        """Return `part` over `whole` for each step that has both, `whole` above 0."""
        wholes = dict(self.named(whole))
        return [
            (step, value / wholes[step]) for step, value in self.named(part) if wholes.get(step)
        ]

    def stretch(
        self, series: Sequence[tuple[int, float]], holds: Callable[[float], bool], *, least: int
    ) -> Stretch | None:
        """Return the last run of at least `least` steps for which `holds` is true.

        Steps without the metric neither belong to a stretch nor end one.
        """
        found: Stretch | None = None
        begun: list[int] = []
        for step, value in series:
            if holds(value):
                begun.append(step)
            else:
                begun = []
            if len(begun) >= least:
                found = Stretch(begun[0], begun[-1], False)
        if found is None or not series:
            return None
        return found._replace(is_over=found.last != series[-1][0])

    def from_start(self, metric: str) -> Change | None:
        """Compare the newest window with the first one; None while they overlap."""
        values = self.named(metric)
        window = window_of(len(values))
        if len(values) < 2 * window:
            return None
        return _change(values, 0, window)

    def from_best(self, metric: str) -> Change | None:
        """Compare the newest window with the one before it whose mean is highest."""
        values = self.named(metric)
        window = window_of(len(values))
        if len(values) < 2 * window:
            return None
        sums = [0.0, *accumulate(value for _, value in values)]
        best = max(
            range(len(values) - 2 * window + 1),
            key=lambda start: sums[start + window] - sums[start],
        )
        found = _change(values, best, window)
        # The best of many windows is above the others by luck, too.
        return found._replace(error=1.5 * found.error)


class GrowingHistory:
    """The history of a run that goes on, in which a number takes 8 bytes."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """`rows`: metrics of earlier steps, in any order; of a step's rows, the last one counts."""
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        for _, row in sorted({int(row["step"]): row for row in rows}.items()):
            self.add(row)

    @property
    def num_steps(self) -> int:
        """Number of its steps."""
        return len(self._steps)

    @property
    def present(self) -> History:
        """The history of all steps so far; it is not for use after the next one."""
        return History(self._steps, self._columns)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the metrics of the next step."""
        for name in row.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan]) * len(self._steps)
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(value if isinstance(value, int | float) else math.nan)
        self._steps.append(int(row["step"]))


def window_of(num_steps: int) -> int:
    """Return the steps of a window: a tenth of all, at least 3 and at most 20."""
    return max(LEAST_IN_WINDOW, min(MOST_IN_WINDOW, num_steps // 10))


def _change(values: Sequence[tuple[int, float]], start: int, window: int) -> Change:
    """Compare the window that begins at `start` with the last one.

    The noise of a step is taken from neighbors of the whole series, which a trend hardly moves and
    which are many where a window has few.
    """
    # Squares of huge numbers are infinite, and those of tiny ones 0; a power of 2 rounds nothing.
    unit = 2.0 ** (math.frexp(max(abs(value) for _, value in values))[1] - 1)
    numbers = [value / unit for _, value in values]
    steps = [later - earlier for earlier, later in pairwise(numbers)]
    noise = math.sqrt(fmean(step * step for step in steps) / 2)
    before, after = fmean(numbers[start : start + window]), fmean(numbers[-window:])
    middle = (before + after) / 2
    begun = len(numbers) - window
    while begun > start + window and (numbers[begun - 1] - middle) * (after - before) > 0:
        begun -= 1
    error = noise * math.sqrt(2 / window)
    return Change(unit * before, unit * after, unit * error, values[begun][0], window)
