"""Small files that survive a kill: written and then renamed, or appended line by line."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from telescope_core.base.decoders import convert
from telescope_core.base.errors import ConfigError, NoRoomError
from telescope_core.base.messages import json_object
from telescope_core.base.terminal import whole
from telescope_core.base.types import JsonValue
from telescope_core.records.folders import whole_file
from telescope_core.records.room import room_for

Record = TypeVar("Record")
_BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the blocks of the file system are."""


def require_utf8(path: Path) -> None:
    """Raise ConfigError for the folder of a run whose path is not UTF-8, as Parquet needs it."""
    shown = whole(str(path))
    if shown != str(path):
        raise ConfigError(
            f"{shown}: expected the folder of a run at a path in UTF-8, which the files of its "
            r"rollouts need, got a byte that is none (\udcff is the byte ff); rename the folder"
        )


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; half a surrogate pair, which UTF-8 lacks, becomes `?`."""
    content = text.encode("utf-8", errors="replace")
    with whole_file(path, needed_bytes=len(content)) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, value: JsonValue) -> None:
    """Write `value` as indented JSON atomically."""
    write_text(path, _indented(value))


def write_state(path: Path, value: JsonValue) -> None:
    """Write `value` as `write_json` does, or over the file's old content if there is no room.

    A full disk must not keep the end of a run from being recorded: others would take it for one
    that goes on. A file that exists has blocks of its own, which need no further room. Raises
    NoRoomError if they are too few.
    """
    try:
        write_json(path, value)
    except NoRoomError:
        content = _indented(value).encode()
        if not path.exists() or len(content) > path.stat().st_blocks * _BLOCK_BYTES:
            raise
        with path.open("r+b", buffering=0) as stream:
            stream.truncate(stream.write(content))


def _indented(value: JsonValue) -> str:
    return json.dumps(plain(value), indent=2) + "\n"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in `path`; None when the file is missing or not a JSON object."""
    try:
        return json_object(path.read_bytes())
    except FileNotFoundError:
        return None


def why_no_object(path: Path) -> str:
    """Return why `read_json` found no object in `path`, as a sentence about its folder."""
    if not path.exists():
        return f"it has no {path.name}"
    return f"its {damaged(path.name)}"


def damaged(name: str) -> str:
    """Return a sentence about the file `name`, which should be a JSON object and is none."""
    return (
        f"{name} is damaged: it was cut off or overwritten, and is no whole JSON object; "
        "if the folder was copied, copy the file again, or else restore it from a backup"
    )


def append_json_line(path: Path, value: Mapping[str, JsonValue]) -> None:
    """Append `value` as one line, on a new line if the last one was cut short."""
    append_content(path, _json_line(value).encode())


def write_json_lines(path: Path, rows: Iterable[Mapping[str, JsonValue]]) -> None:
    """Write `rows` to `path` atomically, one line each."""
    write_text(path, "".join(map(_json_line, rows)))


def _json_line(value: Mapping[str, JsonValue]) -> str:
    return json.dumps(plain(value), separators=(",", ":")) + "\n"


def append_content(path: Path, content: bytes) -> None:
    """Append whole lines in a single write, on a new line if the last one was cut short.

    Creates the folder of the file, but none above: a run or an eval that was moved away while it
    goes on must not leave a second folder in its place.
    """
    with room_for(path, needed_bytes=len(content)):
        path.parent.mkdir(exist_ok=True)
        _append(path, content)


def _append(path: Path, content: bytes) -> None:
    # Without a buffer: a write that finds no room could not be taken back otherwise, as closing the
    # file would write the rest of it.
    with path.open("ab+", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        if not ends_with_line(stream):
            content = b"\n" + content
        try:
            while content:
                content = content[stream.write(content) :]
        except OSError:
            stream.truncate(before)
            raise


def ends_with_line(stream: IO[bytes]) -> bool:
    """Return whether the last line of a file is complete; a kill may have cut it."""
    if not stream.seek(0, os.SEEK_END):
        return True
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == b"\n"


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in `path`, without lines that a kill cut short; none without the file."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for line in stream:
            if (row := json_row(line)) is not None:
                yield row


def json_row(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it is anything else.

    An integer that no float can hold is infinite, because readers compute with floats.
    """
    return json_object(line, parse_int=lambda text: int(text) if len(text) < 300 else float(text))


def is_of_step(row: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics belongs to a step; others are damaged, and left out."""
    step = row.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**62


def num_damaged_lines(
    path: Path, is_row: Callable[[Mapping[str, Any]], bool] = lambda row: True
) -> int:
    """Return how many whole lines of `path` are no object, or none for which `is_row` holds.

    A last line without its end is of a run that is being written, or was killed.
    """
    if not path.exists():
        return 0
    with path.open("rb") as stream:
        return sum(
            line.endswith(b"\n")
            and not line.isspace()
            and ((row := json_object(line)) is None or not is_row(row))
            for line in stream
        )


def lines_left_out(name: str, num_lines: int) -> str:
    """Return a sentence about the damaged lines of the file `name`."""
    lines = (
        "a damaged line, which is" if num_lines == 1 else f"{num_lines:,} damaged lines, which are"
    )
    return f"{name} has {lines} left out; if this folder was copied, copy the file again"


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return the lines of `path` that `asdict` made of a `kind`; damaged ones are left out."""
    found = (record_from(row, kind) for row in read_json_lines(path))
    return [record for record in found if record is not None]


def record_from(row: Mapping[str, Any], kind: type[Record]) -> Record | None:
    """Return the record of type `kind` that `asdict` made `row` of; None if `row` is damaged."""
    try:
        return convert(row, kind, str_keys=True)
    except msgspec.ValidationError:
        return None


def plain(value: JsonValue) -> JsonValue:
    """Return `value` in a form that strict JSON accepts: non-finite numbers become null.

    Scalars of numpy and similar libraries become Python numbers.
    """
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    number = float(value)
    if not math.isfinite(number):
        return None
    is_integer = str(getattr(value, "dtype", "")).startswith(("int", "uint"))
    return int(number) if is_integer else number
