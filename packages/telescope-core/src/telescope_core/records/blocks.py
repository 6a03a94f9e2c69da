"""Block logs: rows that are appended while a run goes on, in a folder of numbered files.

    timeline/000001.parquet   full blocks
    timeline/000002.jsonl     the newest rows, one line each

Lines are there after a kill; once a block is full, it becomes one Parquet file, which is about 20
times smaller and quick to search. A block that cannot be packed stays as lines, which readers take
as well. A log has one writer and any number of readers.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from telescope_core.base.errors import ConfigError, NoRoomError
from telescope_core.records.arrow import arrow_modules
from telescope_core.records.files import append_lines, read_json_lines
from telescope_core.records.folders import whole_file

BLOCK_ROWS = 100_000
"""Rows of a full block."""
_FLUSH_S = 0.5
_MOST_KEPT_ROWS = 500_000
"""Most rows in memory while the disk does not accept them."""
_LOGGER = logging.getLogger(__name__)

Row = TypeVar("Row")
"""A frozen dataclass whose fields are numbers and texts, or None."""


class BlockLog(Generic[Row]):
    """Writes rows to a folder, in a thread of its own: a slow disk holds up nobody.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, folder: Path, kind: type[Row], *, block_rows: int = BLOCK_ROWS) -> None:
        """`kind` is the dataclass of the rows; an open block of an earlier writer is continued."""
        self._folder, self._kind, self._block_rows = folder, kind, block_rows
        self._defaults = _defaults(kind)
        self._values = attrgetter(*self._defaults)
        self._rows: list[Row] = []
        self._keeping = Lock()
        """Held to access the rows in memory."""
        self._writing = Lock()
        """Held while files are written."""
        self._number, self._num_lines = _go_on(folder)
        self.num_lost = 0
        """Number of rows that were dropped: the disk refused them for long, or they cannot be
        encoded."""
        self._is_loss_said = False
        self._is_plain_said = False
        self._ends = Event()
        self._thread = Thread(target=self._write_often, name=f"log {folder.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> "BlockLog[Row]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, row: Row) -> None:
        """Record `row`, from any thread; it is on disk within a second."""
        with self._keeping:
            self._rows.append(row)

    def extend(self, rows: list[Row]) -> None:
        """Record `rows`."""
        with self._keeping:
            self._rows += rows

    def flush(self) -> None:
        """Write the rows in memory; raises NoRoomError if the disk is full, and keeps them then."""
        with self._writing:
            with self._keeping:
                rows, self._rows = self._rows, []
            lines = self._lines(rows)
            try:
                while lines:
                    room = max(1, self._block_rows - self._num_lines)
                    append_lines(self._open_file, (line for _, line in lines[:room]))
                    self._num_lines += len(lines[:room])
                    del lines[:room]
                    if self._num_lines >= self._block_rows:
                        self._pack_or_leave()
                        self._number, self._num_lines = self._number + 1, 0
            finally:
                with self._keeping:
                    self._rows[:0] = [row for row, _ in lines]

    def close(self) -> None:
        """Write the rows in memory and end; the next writer continues an open block."""
        self._ends.set()
        self._thread.join()
        self._flush_or_drop()

    @property
    def _open_file(self) -> Path:
        return self._folder / f"{self._number:06d}.jsonl"

    def _lines(self, rows: list[Row]) -> list[tuple[Row, str]]:
        """Return each row with its line; drops rows that cannot be encoded, such as tensors."""
        lines: list[tuple[Row, str]] = []
        for row in rows:
            try:
                lines.append((row, self._line(row)))
            except (TypeError, ValueError) as error:
                self._lose(1, f"{row!r:.500} cannot be written: {error}")
        return lines

    def _pack_or_leave(self) -> None:
        arrow, _ = arrow_modules()
        try:
            _pack(self._open_file, self._kind)
        # A number that Parquet's types have no room for is an OverflowError of Python's.
        except (arrow.ArrowException, OSError, NoRoomError, OverflowError, TypeError) as error:
            if not self._is_plain_said:
                self._is_plain_said = True
                why = f"{type(error).__name__}: {error}"
                _LOGGER.warning("%s stays as lines of text: %s", self._open_file, why)

    def _lose(self, num_rows: int, why: str) -> None:
        self.num_lost += num_rows
        if not self._is_loss_said:
            self._is_loss_said = True
            _LOGGER.warning("rows for %s are dropped: %s", self._folder, why)

    def _line(self, row: Row) -> str:
        # Most fields of most rows have their default, which is left out.
        pairs = zip(self._defaults.items(), self._values(row), strict=True)
        return _encode({name: value for (name, default), value in pairs if value != default})

    def _write_often(self) -> None:
        while not self._ends.wait(_FLUSH_S):
            self._flush_or_drop()

    def _flush_or_drop(self) -> None:
        try:
            self.flush()
        except (OSError, NoRoomError) as error:
            with self._keeping:
                surplus = max(0, len(self._rows) - _MOST_KEPT_ROWS)
                del self._rows[:surplus]
            if surplus:
                self._lose(surplus, str(error))


def read_blocks(folder: Path, kind: type[Row]) -> Iterator[Row]:
    """Yield the rows of a block log in the order in which they were added.

    Columns that this version does not know are left out. Raises ConfigError that names a file
    which cannot be read.
    """
    names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    for path in block_files(folder):
        rows = _packed_rows(path) if path.suffix == ".parquet" else read_json_lines(path)
        for row in rows:
            try:
                yield kind(**{name: value for name, value in row.items() if name in names})
            except TypeError as error:
                raise ConfigError(f"{path}: a row is incomplete: {error}") from None


def block_files(folder: Path) -> list[Path]:
    """Return the files of a block log in order; a block that exists in two forms is named once."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("[0-9]*.*")):
        # The packed form sorts after the lines, and replaces them: a kill may leave both.
        if path.suffix in (".jsonl", ".parquet"):
            found[path.stem] = path
    return [found[stem] for stem in sorted(found)]


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _defaults(kind: Any) -> dict[str, Any]:
    """Return each field's default; a field without one gets a value that equals no other."""
    return {field.name: field.default for field in fields(kind)}


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


def _pack(lines: Path, kind: type[Any]) -> None:
    """Replace a file of lines by a Parquet file."""
    arrow, parquet = arrow_modules()
    schema = _schema(kind)
    defaults = _defaults(kind)
    rows = [
        {name: row.get(name, defaults[name]) for name in schema.names}
        for row in read_json_lines(lines)
    ]
    with whole_file(lines.with_suffix(".parquet")) as temporary:
        table = arrow.Table.from_pylist(rows, schema=schema)
        parquet.write_table(table, temporary, compression="zstd")
    lines.unlink()


def _packed_rows(path: Path) -> Iterator[dict[str, Any]]:
    arrow, parquet = arrow_modules()
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a readable file of rows: {error}") from None


def _schema(kind: type[Any]) -> Any:
    arrow, _ = arrow_modules()
    kinds = {
        float: arrow.float64(),
        int: arrow.int64(),
        str: arrow.dictionary(arrow.int32(), arrow.string()),
    }
    return arrow.schema(
        [(name, kinds[_plain(hint)]) for name, hint in get_type_hints(kind).items()]
    )


def _plain(hint: Any) -> type[Any]:
    """Return the type of a field, without None."""
    kinds = [one for one in get_args(hint) or (hint,) if one is not type(None)]
    (kind,) = kinds
    return next(one for one in (float, int, str) if issubclass(kind, one))
