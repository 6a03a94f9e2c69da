"""`RowLog` appends rows of one dataclass to files while a run goes on; `RowFiles` reads them.

Rows are lines of JSON first, so that they are there after a kill. A complete file becomes Parquet,
which is about 20 times smaller and quick to search. `blocks` and `events` say which rows share a
file. A log has one writer and any number of readers.
"""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from operator import attrgetter
from pathlib import Path
from threading import Event, Lock, Thread
from types import NoneType
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, get_args, get_type_hints

import msgspec

from telescope_core.base.decoders import json_decoder
from telescope_core.base.errors import ConfigError, NoRoomError
from telescope_core.records.arrow import arrow_modules, reading
from telescope_core.records.files import append_content, plain, read_json_lines
from telescope_core.records.folders import whole_file

_FLUSH_S = 0.5
_MOST_KEPT_ROWS = 500_000
"""Most rows in memory while the disk does not accept them."""
_ENCODER = msgspec.json.Encoder()
_LOGGER = logging.getLogger(__name__)

Row = TypeVar("Row")
"""A frozen dataclass whose fields are numbers and texts, or None; the first is `time_s`."""


class Lines(NamedTuple):
    """Rows as lines of JSON."""

    content: bytes
    num_lost: int = 0
    """Number of rows that cannot be encoded, such as one with a tensor."""
    why: str = ""
    """Why the first of these cannot be encoded."""


class RowFiles(Generic[Row]):
    """Writes and reads files of one kind of rows, as lines of JSON and as Parquet."""

    def __init__(
        self,
        kind: type[Row],
        *,
        int_bits: Literal[32, 64] = 64,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`int_bits` and `options` (of `pyarrow.parquet.write_table`) are those of Parquet."""
        self._kind = kind
        self._int_bits = int_bits
        self._options = options or {"compression": "zstd"}
        hints = get_type_hints(kind)
        self._types = column_types(kind)
        self._enums: dict[str, type[Enum]] = {
            name: hint
            for name, hint in hints.items()
            if isinstance(hint, type) and issubclass(hint, Enum)
        }
        self._floats = [name for name, hint in hints.items() if hint is float]
        """Fields that are never None."""
        known = fields(kind)  # pyright: ignore[reportArgumentType]
        self._defaults = {one.name: one.default for one in known}
        self._values = attrgetter(*self._defaults)
        # Most fields of most rows have their default, which is left out of their lines.
        self._line: Any = msgspec.defstruct(
            f"{kind.__name__}Line",
            [
                (name, self._types[name] | None, *(() if default is MISSING else (default,)))
                for name, default in self._defaults.items()
            ],
            omit_defaults=True,
        )
        self._decoder: Any = json_decoder(self._line)

    def lines(self, rows: Iterable[Row], *, since_s: float = 0.0) -> Lines:
        """Return `rows` as lines; their times are seconds since `since_s`."""
        found = [self._line(*self._values(row)) for row in rows]
        if since_s:
            for one in found:
                one.time_s += since_s
        try:
            return Lines(_ENCODER.encode_lines(found))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
            return self._one_by_one(found)

    def _one_by_one(self, found: Sequence[Any]) -> Lines:
        """Return lines where msgspec refuses a value, such as half a surrogate pair."""
        texts: list[str] = []
        why = ""
        for one in found:
            pairs = msgspec.structs.asdict(one).items()
            try:
                row = {name: value for name, value in pairs if value != self._defaults[name]}
                texts.append(json.dumps(plain(row), separators=(",", ":")))
            except (TypeError, ValueError) as error:
                why = why or f"{one!r:.500} cannot be written: {error}"
        content = "".join(f"{text}\n" for text in texts).encode()
        return Lines(content, len(found) - len(texts), why)

    def pack(self, lines: Path, packed: Path) -> bool:
        """Replace a file of lines by a Parquet file; return whether there were rows in it."""
        rows = self._read_lines(lines)
        if not rows:
            return False
        arrow, parquet = arrow_modules()
        integer = arrow.int32() if self._int_bits == 32 else arrow.int64()
        text = arrow.dictionary(arrow.int32(), arrow.string())
        kinds = {float: arrow.float64(), int: integer, str: text}
        schema = arrow.schema([(name, kinds[one]) for name, one in self._types.items()])
        columns = {name: [getattr(row, name) for row in rows] for name in self._types}
        with whole_file(packed) as temporary:
            table = arrow.Table.from_pydict(columns, schema=schema)
            parquet.write_table(table, temporary, **self._options)
        lines.unlink()
        return True

    def read(self, path: Path, groups: Iterable[int] | None = None) -> Iterator[Row]:
        """Yield the rows of a file in order, of Parquet maybe only those of some row `groups`.

        Columns that this version does not know are left out. Raises ConfigError that names a file
        which cannot be read.
        """
        if path.suffix == ".parquet":
            rows = _packed_rows(path, groups)
        else:
            rows = map(msgspec.structs.asdict, self._read_lines(path))
        for row in rows:
            values = {name: row[name] for name in self._defaults if name in row}
            try:
                enums = {k: enum(values[k]) for k, enum in self._enums.items() if k in values}
                # JSON has no NaN.
                lacking = {k: math.nan for k in self._floats if values.get(k, 0.0) is None}
                made = self._kind(**(values | enums | lacking))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{path}: a row cannot be read: {error}") from None
            yield made

    def _read_lines(self, path: Path) -> list[Any]:
        """Return what is in a file of lines, without those that a kill cut short."""
        try:
            return self._decoder.decode_lines(path.read_bytes())
        except FileNotFoundError:
            return []
        except msgspec.MsgspecError:
            rows = read_json_lines(path)
        try:
            return [self._line(**{k: row[k] for k in self._defaults if k in row}) for row in rows]
        except TypeError as error:
            raise ConfigError(f"{path}: a row is incomplete: {error}") from None


class RowLog(ABC, Generic[Row]):
    """Writes rows to a folder, in a thread of its own: a slow disk holds up nobody.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, folder: Path, files: RowFiles[Row]) -> None:
        """Begin to write; a subclass has to be ready for `append_some` by then."""
        self._folder, self._files = folder, files
        self._rows: list[Row] = []
        self._keeping = Lock()
        """Held to access the rows in memory."""
        self._writing = Lock()
        """Held while files are written."""
        self.num_lost = 0
        """Number of rows that were dropped: the disk refused them for long, or they cannot be
        encoded."""
        self._is_loss_said = False
        self._ends = Event()
        self._thread = Thread(target=self._write_often, name=f"log {folder.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
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
            try:
                while rows:
                    self.append_some(rows)
            finally:
                with self._keeping:
                    self._rows[:0] = rows

    @abstractmethod
    def append_some(self, rows: list[Row]) -> None:
        """Append some of `rows`, at least one, to one file, and remove them from the list."""
        ...

    def close(self) -> None:
        """Write the rows in memory and end; the next writer continues files that are not packed."""
        self._ends.set()
        self._thread.join()
        self._flush_or_drop()

    def _append_lines(self, path: Path, rows: Sequence[Row], *, since_s: float = 0.0) -> int:
        """Append `rows` to a file, and return the number of those that can be encoded."""
        lines = self._files.lines(rows, since_s=since_s)
        if lines.content:
            append_content(path, lines.content)
        if lines.num_lost:
            self._lose(lines.num_lost, lines.why)
        return len(rows) - lines.num_lost

    def _lose(self, num_rows: int, why: str) -> None:
        self.num_lost += num_rows
        if not self._is_loss_said:
            self._is_loss_said = True
            _LOGGER.warning("rows for %s are dropped: %s", self._folder, why)

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


def _packed_rows(path: Path, groups: Iterable[int] | None) -> Iterator[dict[str, Any]]:
    _, parquet = arrow_modules()
    with reading(path, "file of rows"), parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups) if groups is None else groups:
            yield from file.read_row_group(group).to_pylist()


def column_types(kind: type[Any]) -> dict[str, type[Any]]:
    """Return whether each field of a row is a float, int or str, apart from None."""
    found: dict[str, type[Any]] = {}
    for name, hint in get_type_hints(kind).items():
        (plain_type,) = (one for one in get_args(hint) or (hint,) if one is not NoneType)
        found[name] = next(one for one in (float, int, str) if issubclass(plain_type, one))
    return found
