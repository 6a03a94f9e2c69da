"""The meters of one machine: processors, memory, disk, network, and its GPUs.

Rates are over the time since the reading before. A machine without NVIDIA's library has no rows for
GPUs.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class Reading(NamedTuple):
    """What one meter shows."""

    part: str
    """`gpu 3`; empty for the machine itself."""
    name: str
    value: float


class NodeMeters:
    """Reads the meters of the machine that it is on."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: whose disk is watched for room; None = that of the working directory."""
        self._folder = folder if folder is not None and folder.exists() else Path.cwd()
        self._gpus = _Gpus()
        self._before = _counters()
        psutil.cpu_percent()  # the first call measures nothing

    def read(self) -> list[Reading]:
        """Return what all meters show."""
        memory, before, now = psutil.virtual_memory(), self._before, _counters()
        self._before = now
        seconds = max(1e-3, now.time_s - before.time_s)
        found = [
            Reading("", "cpu/used_share", psutil.cpu_percent() / 100),
            Reading("", "memory/used_bytes", float(memory.total - memory.available)),
            Reading("", "memory/total_bytes", float(memory.total)),
            Reading("", "disk/free_bytes", float(shutil.disk_usage(self._folder).free)),
        ]
        for name, newer, older in zip(_RATES, now.totals, before.totals, strict=True):
            # A counter that is begun anew, such as that of a network card, is no negative rate.
            found.append(Reading("", name, max(0.0, newer - older) / seconds))
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
    totals: tuple[float, float, float, float]
    """In the order of `_RATES`."""


def _counters() -> _Counters:
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    return _Counters(
        time.monotonic(),
        (
            float(disk.read_bytes) if disk else 0.0,
            float(disk.write_bytes) if disk else 0.0,
            float(network.bytes_recv) if network else 0.0,
            float(network.bytes_sent) if network else 0.0,
        ),
    )


class _Gpus:
    """NVIDIA's GPUs, by NVML."""

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
        """Yield what the GPUs show; a meter that a GPU lacks is left out."""
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
"""Every name that a machine can have."""
