"""Block logs: rows that are appended while a run goes on, in a folder of numbered files.

    timeline/000001.parquet   full blocks
    timeline/000002.jsonl     the newest rows, one line each

A block that cannot be packed stays as lines, which readers take as well.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from telescope_core.base.errors import ConfigError, NoRoomError
from telescope_core.records.arrow import arrow_modules
from telescope_core.records.files import read_json_lines
from telescope_core.records.row_log import Row, RowFiles, RowLog

BLOCK_ROWS = 100_000
"""Rows of a full block."""
_LOGGER = logging.getLogger(__name__)


class BlockLog(RowLog[Row]):
    """A log in blocks of so many rows."""

    def __init__(self, folder: Path, kind: type[Row], *, block_rows: int = BLOCK_ROWS) -> None:
        """`kind` is the dataclass of the rows; an open block of an earlier writer is continued."""
        self._block_rows = block_rows
        self._number, self._num_lines = _go_on(folder)
        self._is_plain_said = False
        super().__init__(folder, RowFiles(kind))

    def append_some(self, rows: list[Row]) -> None:
        """Append as many as the open block has room for, and pack it if it is full then."""
        room = max(1, self._block_rows - self._num_lines)
        lines = self._folder / f"{self._number:06d}.jsonl"
        self._num_lines += self._append_lines(lines, rows[:room])
        del rows[:room]
        if self._num_lines >= self._block_rows:
            self._pack_or_leave(lines)
            self._number, self._num_lines = self._number + 1, 0

    def _pack_or_leave(self, lines: Path) -> None:
        arrow, _ = arrow_modules()
        try:
            self._files.pack(lines, lines.with_suffix(".parquet"))
        # A number that Parquet's types have no room for is an OverflowError of Python's.
        except (
            *(arrow.ArrowException, OSError, NoRoomError, OverflowError, TypeError, ConfigError),
        ) as error:
            if not self._is_plain_said:
                self._is_plain_said = True
                why = f"{type(error).__name__}: {error}"
                _LOGGER.warning("%s stays as lines of text: %s", lines, why)


def read_blocks(folder: Path, kind: type[Row]) -> Iterator[Row]:
    """Yield the rows of a block log in the order in which they were added; see `RowFiles.read`."""
    files = RowFiles(kind)
    for path in block_files(folder):
        yield from files.read(path)


def block_files(folder: Path) -> list[Path]:
    """Return the files of a block log in order."""
    return [folder / name for name in block_names(path.name for path in folder.glob("*"))]


def block_names(names: Iterable[str]) -> list[str]:
    """Return the names of blocks in order; a block that exists in two forms is named once."""
    # The packed form sorts after the lines, and replaces them: a kill may leave both.
    found = {Path(one).stem: one for one in sorted(names) if _BLOCK.fullmatch(one)}
    return [found[stem] for stem in sorted(found)]


_BLOCK = re.compile(r"\d+\.(jsonl|parquet)")


def _go_on(folder: Path) -> tuple[int, int]:
    """Return the number and lines of the open block; removes files that a kill left twice."""
    files = block_files(folder)
    for path in files:
        if path.suffix == ".parquet":
            path.with_suffix(".jsonl").unlink(missing_ok=True)
    if not files:
        return 1, 0
    number = int(files[-1].stem)
    if files[-1].suffix == ".parquet":
        return number + 1, 0
    return number, sum(1 for _ in read_json_lines(files[-1]))
