"""Files of JSON lines of a run, read while they grow: `NewRows`, and `JsonLines` for small ones.

The amount that is read and kept is limited, however large a file is, and the result says what was
left out.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from telescope_core.base.decoders import json_decoder
from telescope_core.records.files import lines_left_out, plain
from telescope_core.records.follow import LineTail
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.run_files import inside

MAX_LINE_BYTES = 8 * 2**20
"""Bytes of the longest line of metrics; longer ones are skipped."""
MAX_FILE_BYTES = 512 * 2**20
"""Largest part of such a file that is read."""
_MAX_SMALL_LINE_BYTES = 2**20
_MAX_SMALL_FILE_BYTES = 64 * 2**20

Row = TypeVar("Row")


class NewRows(Generic[Row]):
    """Iterates over the new rows of a file; not for several threads at once.

    Ask `is_rewritten` each time before.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        kind: type[Row],
        *,
        is_row: Callable[[Row], bool] = lambda row: True,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Read `name` in the resolved folder `run`; lines that are no `kind` are left out.

        So are those for which `is_row` does not hold.
        """
        self._run, self._name = run, name
        self._is_row = is_row
        self._num_damaged = 0
        self._decoder = json_decoder(kind)
        self._tail = LineTail(
            run / name, max_line_bytes=max_line_bytes, max_file_bytes=max_file_bytes
        )

    @property
    def problems(self) -> list[str]:
        """A sentence about each part of the file that is left out."""
        damaged = [lines_left_out(self._name, self._num_damaged)] if self._num_damaged else []
        return [*self._tail.problems, *damaged]

    def is_rewritten(self) -> bool:
        """Return whether the rows that were read have changed; forgets them in that case."""
        is_rewritten = self._tail.is_rewritten()
        if is_rewritten:
            self._num_damaged = 0
        return is_rewritten

    def __iter__(self) -> Iterator[Row]:
        if inside(self._run, self._name) is None:
            return
        for block in self._tail.blocks():
            for row in self._rows_in(block):
                if self._is_row(row):
                    yield row
                else:
                    self._num_damaged += 1

    def _rows_in(self, block: bytes) -> Iterator[Row]:
        try:
            yield from self._decoder.decode_lines(block)
        except (ValueError, RecursionError):
            for line in filter(bytes.strip, block.split(b"\n")):
                try:
                    # Python's parser takes NaN, and so do the commands.
                    row = self._decoder.decode(json.dumps(plain(json.loads(line))))
                except (ValueError, RecursionError):
                    self._num_damaged += 1
                else:
                    yield row


class JsonLines:
    """The objects in one small file of a run; any thread may ask."""

    def __init__(
        self, run: Path, name: str, *, is_row: Callable[[JsonObject], bool] = lambda row: True
    ) -> None:
        """Read the file `name` of the resolved folder `run`; `is_row` is as in `NewRows`."""
        self._new = NewRows(
            run,
            name,
            dict[str, Any],
            is_row=is_row,
            max_line_bytes=_MAX_SMALL_LINE_BYTES,
            max_file_bytes=_MAX_SMALL_FILE_BYTES,
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
            return self._new.problems

    def _refresh(self) -> None:
        if self._new.is_rewritten():
            self._rows = []
        self._rows += self._new
