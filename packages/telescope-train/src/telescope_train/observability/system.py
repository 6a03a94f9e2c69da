"""The meters of one machine: processors, memory, disk, network, and its GPUs.

Rates and the share of the processors are over the time since the reading before. They are computed
from counters that the meters keep themselves: psutil keeps its own for each thread, and a reading
may be made in any. A machine without NVIDIA's library has no rows for GPUs.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

LEAST_S = 0.2
"""Least seconds for a rate, because processor times are in hundredths of a second."""


class Reading(NamedTuple):
    """One reading of a meter."""

    part: str
    """Part of the machine, such as `gpu 3`; empty for the machine itself."""
    name: str
    value: float


class NodeMeters:
    """Reads the meters of its own machine."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: one on the disk to be watched; None = the working directory."""
        self._folder = folder if folder is not None and folder.exists() else Path.cwd()
        self._gpus = _Gpus()
        self._before = _counters()

    def read(self) -> list[Reading]:
        """Return the readings of all meters; rates only if enough time has passed."""
        memory = psutil.virtual_memory()
        found = [
            Reading("", "memory/used_bytes", float(memory.total - memory.available)),
            Reading("", "memory/total_bytes", float(memory.total)),
            Reading("", "disk/free_bytes", float(shutil.disk_usage(self._folder).free)),
        ]
        before, now = self._before, _counters()
        if now.time_s - before.time_s >= LEAST_S:
            self._before = now
            found += _rates(before, now)
        found += self._gpus.read()
        return found


_RATES = (
    "disk/read_bytes_per_s",
    "disk/written_bytes_per_s",
    "network/received_bytes_per_s",
    "network/sent_bytes_per_s",
)


class _Counters(NamedTuple):
    time_s: float
    busy_s: float
    """Busy seconds of all processors together, since boot."""
    processors_s: float
    """Seconds of all processors together."""
    totals: tuple[float, float, float, float]
    """Totals in the order of `_RATES`."""


def _counters() -> _Counters:
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    processors_s, busy_s = _processor_times(psutil.cpu_times())
    return _Counters(
        time.monotonic(),
        busy_s,
        processors_s,
        (
            float(disk.read_bytes) if disk else 0.0,
            float(disk.write_bytes) if disk else 0.0,
            float(network.bytes_recv) if network else 0.0,
            float(network.bytes_sent) if network else 0.0,
        ),
    )


def _processor_times(times: Any) -> tuple[float, float]:
    """Return (all seconds, busy seconds) from psutil's `cpu_times`."""
    # Linux counts the time of guests in that of users as well.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    all_s = sum(times) - guests_s
    return all_s, all_s - times.idle - getattr(times, "iowait", 0.0)


def _rates(before: _Counters, now: _Counters) -> Iterator[Reading]:
    all_s = now.processors_s - before.processors_s
    if all_s > 0:
        share = (now.busy_s - before.busy_s) / all_s
        yield Reading("", "cpu/used_share", min(1.0, max(0.0, share)))
    seconds = now.time_s - before.time_s
    for name, newer, older in zip(_RATES, now.totals, before.totals, strict=True):
        # A counter that is begun anew, such as that of a network card, is no negative rate.
        yield Reading("", name, max(0.0, newer - older) / seconds)


class _Gpus:
    """NVIDIA's GPUs, through NVML."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except pynvml.NVMLError:
            return  # there is no driver, and so no GPU
        self._nvml = pynvml

    def read(self) -> Iterator[Reading]:
        """Yield the readings of the GPUs; a meter that a GPU lacks is left out."""
        for index, handle in enumerate(self._handles):
            for name, measure in _GPU_METERS.items():
                try:
                    value = measure(self._nvml, handle)
                except self._nvml.NVMLError:
                    continue
                yield Reading(f"gpu {index}", name, float(value))


_GPU_METERS: dict[str, Any] = {
    "gpu/used_share": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "gpu/memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "gpu/memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "gpu/temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(
        gpu, nvml.NVML_TEMPERATURE_GPU
    ),
    "gpu/power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "gpu/sm_clock_hertz": lambda nvml, gpu: (
        nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6
    ),
    "gpu/memory_clock_hertz": lambda nvml, gpu: (
        nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM) * 1e6
    ),
}
NODE_METERS = (
    *("cpu/used_share", "memory/used_bytes", "memory/total_bytes", "disk/free_bytes"),
    *_RATES,
    *_GPU_METERS,
)
"""All possible names of meters of a machine."""
