"""Control groups of local sandboxes, versions 1 and 2, if this process may create them.

A group is named after the process that created it, so that groups of a killed process can be
recognized and removed.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from telescope_core.base.process_facts import process_started

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "telescope-sandbox"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\d+")
_PERIOD_US = 100_000
_REMOVALS = 200
_BETWEEN_REMOVALS_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Controllers:
    """The folder of each controller in which this process can create groups."""

    version: int
    folders: Mapping[str, Path]
    """Controller -> folder, for those of `memory` and `cpu` that are usable."""


class ControlGroup:
    """The control group of one sandbox: one folder, or one for each controller of version 1."""

    def __init__(
        self, controllers: Controllers, number: int, *, memory_bytes: int | None, cpus: float | None
    ) -> None:
        """Make the folders and write the limits, None for no limit.

        Raises OSError if one cannot be written.
        """
        self._version = controllers.version
        wanted = {"memory": memory_bytes, "cpu": cpus}
        name = f"{_PREFIX}-{os.getpid()}-{process_started(os.getpid())}-{number}"
        self._folders = {
            controller: folder / name
            for controller, folder in controllers.folders.items()
            if wanted[controller] is not None
        }
        try:
            for folder in set(self._folders.values()):
                folder.mkdir()
            self._limit(memory_bytes, cpus)
        except OSError:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children are in it too."""
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def num_killed(self) -> int:
        """Return how many processes were killed because the group had no memory left."""
        folder = self._folders.get("memory")
        if folder is None:
            return 0
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            rows = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(rows.get("oom_kill", 0))
        return 0

    def remove(self) -> bool:
        """Remove the group; False while processes are still in it."""
        for folder in set(self._folders.values()):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    async def removed(self) -> None:
        """Remove the group; waits, as the kernel may release ended processes a moment later."""
        for _ in range(_REMOVALS):
            if self.remove():
                return
            await asyncio.sleep(_BETWEEN_REMOVALS_S)

    def _limit(self, memory_bytes: int | None, cpus: float | None) -> None:
        if (folder := self._folders.get("memory")) is not None:
            size = str(memory_bytes)
            if self._version == 2:
                (folder / "memory.max").write_text(size)
                _write_if_there(folder / "memory.swap.max", "0")
                _write_if_there(folder / "memory.oom.group", "0")
            else:
                (folder / "memory.limit_in_bytes").write_text(size)
                _write_if_there(folder / "memory.memsw.limit_in_bytes", size)
        if (folder := self._folders.get("cpu")) is not None and cpus is not None:
            quota = round(cpus * _PERIOD_US)
            if self._version == 2:
                (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))


def usable_controllers() -> Controllers:
    """Return the controllers that this process can use; removes groups of ended processes."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return Controllers(version=2, folders={})
    own = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    if (_ROOT / "cgroup.controllers").is_file():
        folder = _ROOT / own.get("", "/").lstrip("/")
        enabled = list[str]()
        with contextlib.suppress(OSError):
            enabled = (folder / "cgroup.subtree_control").read_text().split()
        found = {name: folder for name in ("memory", "cpu") if name in enabled}
        controllers = Controllers(version=2, folders=_those_writable(found))
    else:
        found = {
            name: _ROOT / names / path.lstrip("/")
            for names, path in own.items()
            for name in names.split(",")
            if name in ("memory", "cpu")
        }
        controllers = Controllers(version=1, folders=_those_writable(found))
    for folder in set(controllers.folders.values()):
        _remove_abandoned(folder)
    return controllers


def _those_writable(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Return the folders in which a group can be created, found by creating one."""
    usable: dict[str, Path] = {}
    for name, folder in folders.items():
        probe = folder / f"{_PREFIX}-{os.getpid()}-{process_started(os.getpid())}-0"
        try:
            with contextlib.suppress(FileExistsError):
                probe.mkdir()
            with (probe / "cgroup.procs").open("r+"):
                pass
            usable[name] = folder
        except OSError:
            continue
        finally:
            with contextlib.suppress(OSError):
                probe.rmdir()
    return usable


def _remove_abandoned(folder: Path) -> None:
    """Remove groups of processes that have ended; groups in use cannot be removed."""
    for group in folder.glob(f"{_PREFIX}-*"):
        match = _NAME.fullmatch(group.name)
        if match is not None and process_started(int(match[1])) != match[2]:
            with contextlib.suppress(OSError):
                group.rmdir()


def _write_if_there(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text)
