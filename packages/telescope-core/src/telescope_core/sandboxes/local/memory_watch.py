"""Limit the total memory of a sandbox's processes, on machines without usable control groups.

The kernel then limits each process alone, and a program may start many.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

_EVERY_S = 0.02
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(root_pid: int, max_bytes: int, on_exceeded: Callable[[], None]) -> None:
    """Call `on_exceeded` once when `root_pid` and its descendants use more than `max_bytes`."""
    while held_bytes(root_pid) <= max_bytes:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(_EVERY_S)
    on_exceeded()


def held_bytes(root_pid: int) -> int:
    """Return the memory of a process and its descendants, without pages of files."""
    waiting, total = [root_pid], 0
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            _, resident, shared, *_ = (folder / "statm").read_text().split()
            total += max(0, int(resident) - int(shared)) * _PAGE_BYTES
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return total
