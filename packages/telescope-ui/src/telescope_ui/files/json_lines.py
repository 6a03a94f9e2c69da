"""`JsonLines`: the rows of a small file of JSON lines of a run, which grow as the file does.

The amount that is read and kept is limited, however large the file is, and the result says what was
left out.
"""

from pathlib import Path
from threading import Lock
from typing import Any, cast

import msgspec

from telescope_ui.base.answers import JsonObject
from telescope_ui.files.line_tail import LineTail
from telescope_ui.files.run_files import inside

MAX_LINE_BYTES = 2**20
MAX_FILE_BYTES = 64 * 2**20


class JsonLines:
    """The objects in one file of a run; any thread may ask."""

    def __init__(self, run: Path, name: str) -> None:
        """Read the file `name` of the resolved folder `run`."""
        self._run, self._name = run, name
        self._tail = LineTail(
            run / name, max_line_bytes=MAX_LINE_BYTES, max_file_bytes=MAX_FILE_BYTES
        )
        self._lock = Lock()
        self._rows: list[JsonObject] = []

    def rows(self) -> list[JsonObject]:
        """Return the objects, oldest first; lines that are anything else are left out."""
        with self._lock:
            self._refresh()
            return list(self._rows)

    def problems(self) -> list[str]:
        """Return what is left out of the file, each as a sentence."""
        with self._lock:
            self._refresh()
            return self._tail.problems

    def _refresh(self) -> None:
        if self._tail.is_rewritten():
            self._rows = []
        if inside(self._run, self._name) is None:
            return
        for line in self._tail.lines():
            try:
                row: object = msgspec.json.decode(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                self._rows.append(cast(dict[str, Any], row))
