"""Collect readings of meters: `StepMeters` between steps, `SecondMeters` second by second.

Each meter of each source is averaged over the step, or over the second. Over all sources there are
the totals that make sense for the meter, so that an idle machine does not hide a full one:

    meter/NAME/sum           throughput, and requests
    meter/NAME/mean, /max    shares, memory, temperatures, latencies, and everything else
    meter/NAME/SOURCE        each source by itself, up to `MOST_SOURCES` of them

In seconds they are called gauge/..., because they have a time axis of their own.
"""

from threading import Lock
from typing import NamedTuple

from telescope_core.records.timeline import GaugeSample

MOST_SOURCES = 16
"""Most sources with curves of their own; beyond that, only totals are drawn."""


class StepMeters:
    """Collects readings; any thread may call it."""

    def __init__(self, prefix: str = "meter") -> None:
        self._prefix = prefix
        self._found: dict[str, dict[str, tuple[float, int]]] = {}
        """Meter -> source -> (sum of its readings, their number)."""
        self._holding = Lock()

    def add(self, sample: GaugeSample) -> None:
        """Take a reading."""
        with self._holding:
            of_meter = self._found.setdefault(sample.name, {})
            total, count = of_meter.get(sample.source, (0.0, 0))
            of_meter[sample.source] = (total + sample.value, count + 1)

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call."""
        with self._holding:
            found, self._found = self._found, {}
        numbers: dict[str, float] = {}
        for name, of_meter in found.items():
            means = {source: total / count for source, (total, count) in of_meter.items()}
            if _adds_up(name):
                numbers[f"{self._prefix}/{name}/sum"] = sum(means.values())
            else:
                numbers[f"{self._prefix}/{name}/mean"] = sum(means.values()) / len(means)
                numbers[f"{self._prefix}/{name}/max"] = max(means.values())
            if len(means) <= MOST_SOURCES:
                of_sources = {f"{self._prefix}/{name}/{of}": mean for of, mean in means.items()}
                numbers |= of_sources
        return numbers


class Second(NamedTuple):
    """The readings of all meters in one second."""

    time_s: int
    """Seconds since 1970, UTC."""
    numbers: dict[str, float]


class SecondMeters:
    """Collects readings, second by second; only one thread at a time may call it."""

    def __init__(self) -> None:
        self._meters = StepMeters("gauge")
        self._time_s: int | None = None

    def add(self, sample: GaugeSample) -> Second | None:
        """Add a reading; returns the previous second when a new one begins."""
        time_s = int(sample.time_s)
        done = self.take() if self._time_s is not None and time_s > self._time_s else None
        # A reading that comes late counts in the second that is being collected.
        self._time_s = max(time_s, self._time_s or time_s)
        self._meters.add(sample)
        return done

    def take(self) -> Second | None:
        """Return the readings since the last complete second; None = there are none."""
        if self._time_s is None or not (numbers := self._meters.take()):
            return None
        return Second(self._time_s, numbers)


def _adds_up(name: str) -> bool:
    return name.endswith("_per_s") or "/requests_" in name
