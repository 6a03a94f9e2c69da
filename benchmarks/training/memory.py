"""The most memory that was held, on this device; a process on the CPU, tensors on a GPU."""

import re
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available()


def start_of_peak() -> float:
    """Forget the peak so far; returns the GiB held now."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**30
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_gib("VmRSS")


def peak_gib() -> float:
    """Return the most that was held since `start_of_peak`, GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else _resident_gib("VmHWM")


def _resident_gib(line: str) -> float:
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"no {line} in /proc/self/status: this benchmark needs Linux"
    return int(found[1]) / 2**20
