"""Choose the device, dtype and threads of this machine, in one place for all processes.

Does not import torch, so that a dry run stays fast.
"""

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from telescope_train.models.facts import ModelFacts

Device: TypeAlias = Literal["cpu", "cuda"]

DEVICES = Path("/dev")
"""Paths under which Linux lists GPUs: `nvidia0` and so on, or `dxg` under WSL on Windows."""
CPU_FACTS = Path("/proc/cpuinfo")
WORTH_ALL_CORES = 20_000_000
"""Parameters of a model whose products are large enough to use all cores.

A model of unknown size counts as one.
"""


def machine_device() -> Device:
    """Return `cuda` when this process can compute on an NVIDIA GPU, else `cpu`.

    That takes a GPU that this machine or container can open and that `CUDA_VISIBLE_DEVICES` does
    not hide, and a torch that was built for CUDA. A driver alone does not show that there is a GPU,
    because containers without one see the driver of their host.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    has_gpu = any(DEVICES.glob("nvidia[0-9]*")) or (DEVICES / "dxg").exists()
    return "cuda" if has_gpu and not is_hidden and torch_has_cuda() else "cpu"


def cpu_has_amx() -> bool:
    """Return whether this machine's processors multiply tiles of matrices, as Intel's with AMX."""
    return CPU_FACTS.exists() and " amx_tile" in CPU_FACTS.read_text(encoding="utf-8")


def machine_gpus() -> list[int]:
    """Return the bytes of each GPU that this process may use; 0 = not reported.

    Asks NVIDIA's library, or counts the GPUs without it.
    """
    if machine_device() != "cuda":
        return []
    sizes = _sizes_of_gpus() or [0] * len(list(DEVICES.glob("nvidia[0-9]*")))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return sizes or [0]
    # GPUs are named by number or by a unique id, which says nothing of their size here.
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return [
        sizes[int(name)] if name.isdigit() and int(name) < len(sizes) else min(sizes, default=0)
        for name in names
    ]


def shared_memory_bytes() -> int | None:
    """Return the size of the shared memory of this machine, or container; None = not known."""
    try:
        found = os.statvfs(DEVICES / "shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _sizes_of_gpus() -> list[int]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    except pynvml.NVMLError:
        return []


def compute_dtype(mixed_precision_dtype: str | None, device: str) -> str:
    """Return the name of the dtype of the layers; None = the default of the device."""
    return mixed_precision_dtype or ("bfloat16" if device == "cuda" else "float32")


@cache
def torch_has_cuda() -> bool:
    """Return whether the installed torch is a CUDA build, read from its files.

    Importing torch would take seconds. Returns True if torch is not installed: nothing can run
    then, and the plan describes the abilities of the machine.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    version = Path(spec.origin).with_name("version.py")
    try:
        text = version.read_text(encoding="utf-8")
    except OSError:
        return True
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def threads_of(facts: ModelFacts, *, num_ranks: int, is_alone: bool) -> int:
    """Return the number of threads of each of `num_ranks` ranks without a GPU.

    `is_alone`: they are all on this machine and nothing of the run is beside them.
    """
    size = facts.num_parameters
    if not is_alone or (size is not None and size < WORTH_ALL_CORES):
        return 1
    return max(1, usable_cores() // num_ranks)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
