"""`StepMeters`: what the meters showed since the step before, as numbers of a step.

Of each meter and source the mean over that time counts. Over all sources there is what makes sense
of the meter, so that an idle machine does not hide a full one:

    meter/NAME/sum           throughput, and requests
    meter/NAME/mean, /max    shares, memory, temperatures, latencies, and everything else
    meter/NAME/SOURCE        each source by itself, up to `MOST_SOURCES` of them
"""

from threading import Lock

from telescope_core.records.timeline import GaugeSample

MOST_SOURCES = 16
"""Sources that each have a curve of their own; with more, only those over all of them are drawn."""


class StepMeters:
    """Collects readings; any thread may call it."""

    def __init__(self) -> None:
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
        """Return the numbers of the time since the last call."""
        with self._holding:
            found, self._found = self._found, {}
        numbers: dict[str, float] = {}
        for name, of_meter in found.items():
            means = {source: total / count for source, (total, count) in of_meter.items()}
            if _adds_up(name):
                numbers[f"meter/{name}/sum"] = sum(means.values())
            else:
                numbers[f"meter/{name}/mean"] = sum(means.values()) / len(means)
                numbers[f"meter/{name}/max"] = max(means.values())
            if len(means) <= MOST_SOURCES:
                numbers |= {f"meter/{name}/{source}": mean for source, mean in means.items()}
        return numbers


def _adds_up(name: str) -> bool:
    return name.endswith("_per_s") or "/requests_" in name
