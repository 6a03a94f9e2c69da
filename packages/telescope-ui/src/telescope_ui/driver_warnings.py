"""`DriverWarnings`: the warnings in the log of a run's driver, read once each as the log grows."""

from pathlib import Path
from threading import Lock

import msgspec

from telescope_ui.line_tail import LineTail
from telescope_ui.run_files import listed

_LOG = "driver"
_MAX_FILES = 4
"""The newest file of a log, and those that were full before it."""
_MAX_LINE_BYTES = 2**16
_MAX_FILE_BYTES = 80 * 2**20
"""A file is renamed at 64 MiB."""
_MAX_WARNINGS = 1000
_HEAD_BYTES = 100
"""In which a line says its level: few are warnings, and reading all as JSON would take long."""


class Warned(msgspec.Struct, frozen=True):
    """A line of the log, as far as it is looked at."""

    time_s: float
    level: str = ""
    message: str = ""


class DriverWarnings:
    """Warnings of one run; any thread may ask."""

    def __init__(self, run: Path) -> None:
        """Read the logs of the resolved folder `run`."""
        self._run = run
        self._lock = Lock()
        self._files: dict[Path, tuple[LineTail, list[Warned]]] = {}

    def rows(self) -> list[Warned]:
        """Return the warnings, oldest first; of very many, the first ones of each file."""
        with self._lock:
            found = listed(self._run, "logs", suffixes=(".jsonl",))
            own = [one.path for one in found if one.name.partition(".")[0] == _LOG][:_MAX_FILES]
            self._files = {
                path: self._files.get(path) or (_tail(path), list[Warned]()) for path in own
            }
            for tail, warned in self._files.values():
                if tail.is_rewritten():
                    warned.clear()
                _read(tail, warned)
            rows = [one for _, warned in self._files.values() for one in warned]
        return sorted(rows, key=lambda one: one.time_s)


def _tail(path: Path) -> LineTail:
    return LineTail(path, max_line_bytes=_MAX_LINE_BYTES, max_file_bytes=_MAX_FILE_BYTES)


def _read(tail: LineTail, warned: list[Warned]) -> None:
    for line in tail.lines():
        if len(warned) >= _MAX_WARNINGS or b'"warning"' not in line[:_HEAD_BYTES]:
            continue
        try:
            row = msgspec.json.decode(line, type=Warned)
        except (ValueError, RecursionError):
            continue
        if row.level == "warning":
            warned.append(row)
