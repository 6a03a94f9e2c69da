"""A log in a run folder: its files, which are read in both directions, and their lines.

A log of JSON lines may have full files beside the newest one: `driver.2.jsonl`, `driver.1.jsonl`,
`driver.jsonl`, oldest first. They may be renamed while they are read, so a file is identified by
its first bytes, and not by its name. Lines have a time and a level, in text of programs too.
"""

import calendar
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from telescope_core.records.logs import (
    HEAD,
    LEVEL_WORDS,
    WRITTEN_TIME,
    base_name,
    level_of,
    log_files,
)
from telescope_ui.files.run_files import Listed, Stamp, stamp_in

MAX_CHARACTERS = 16_384
LEVELS = ("debug", "info", "warning", "error")
_BLOCK_BYTES = 2**18
_FIRST_BLOCK_BYTES = 2**14
"""Size of the first read in each log of JSON lines; many logs then have a last page soon."""
_MAX_LINE_BYTES = 2**20
_FIRST_LINE_BYTES = 2**16
"""Bytes in which the first line of a log must end to be used as its beginning."""
_SETTLED_S = 2.0
"""Seconds without a change after which an incomplete last line counts as complete."""


class LogLine(NamedTuple):
    """One line, and its beginning and end in the file."""

    time_s: float
    level: str
    component: str
    source: str
    life: int | None
    """Number of the start of its process, if the line has it."""
    message: str
    start: int = 0
    end: int = 0
    is_cut: bool = False


class FileFacts(NamedTuple):
    """Facts about a log file that are known without its content."""

    component: str
    mtime_s: float
    year: int
    """Year of the last change, because many programs write times without a year."""
    utc_offset_s: int
    """Offset of local time from UTC, for times without a zone."""


class _Origin(NamedTuple):
    """Values that all lines of a log share, if they contain them."""

    component: str
    source: str


class LogFile:
    """A file of a log, whose complete lines are read in both directions."""

    def __init__(self, listed_file: Listed, *, is_newest: bool) -> None:
        """`is_newest`: the program that writes the log may still write to this file."""
        stamp = listed_file.stamp
        self.is_json = listed_file.name.endswith(".jsonl")
        self.size = stamp.size
        self._path: Path = listed_file.path
        self._stamp: Stamp = stamp
        mtime_s = stamp.mtime_ns / 1e9
        self._is_settled = not is_newest or time.time() - mtime_s > _SETTLED_S
        log, _ = base_name(listed_file.name)
        first = self._first_line() if self.is_json else b""
        self.key = f"{log}#{zlib.crc32(first):08x}" if first else listed_file.name
        """Identifies the file in cursors, even after it is renamed."""
        row = _json_object(first) or {}
        # Other programs may write lines of several processes into one file.
        is_of_one_process = {"component", "source", "life"} <= row.keys()
        self.origin = (
            _Origin(str(row["component"]), str(row["source"])) if is_of_one_process else None
        )
        local = time.localtime(mtime_s)
        self._facts = FileFacts(
            component=str(row.get("component") or Path(log).stem),
            mtime_s=mtime_s,
            year=local.tm_year,
            utc_offset_s=local.tm_gmtoff,
        )

    @property
    def component(self) -> str:
        """Name of the component of the log, for lines without one."""
        return self._facts.component

    def end(self) -> int:
        """Return the position behind the last complete line."""
        if self._is_settled or not self.size:
            return self.size
        with self._path.open("rb") as stream:
            if not self._is_same(stream):
                return 0
            start = max(0, self.size - _MAX_LINE_BYTES)
            stream.seek(start)
            return start + stream.read(self.size - start).rfind(b"\n") + 1

    def backwards(self, end: int) -> Iterator[LogLine]:
        """Yield the lines before the position `end`, last one first."""
        if end == 0:
            return
        with self._path.open("rb") as stream:
            if not self._is_same(stream):
                return
            step = _FIRST_BLOCK_BYTES if self.is_json else _BLOCK_BYTES
            while end > 0:
                start, size = end, step
                step = min(2 * step, _BLOCK_BYTES)
                block = b""
                # A block begins where a line does; one that is longer than a block takes more.
                while start > 0 and (start == end or b"\n" not in block[:-1]):
                    if end - start >= _MAX_LINE_BYTES:
                        break
                    start = max(0, end - size)
                    stream.seek(start)
                    block = stream.read(end - start)
                    size *= 2
                if start > 0 and b"\n" in block[:-1]:
                    skipped = block.index(b"\n") + 1
                    start, block = start + skipped, block[skipped:]
                yield from reversed(self._lines(block, start))
                end = start

    def forwards(self, start: int, end: int) -> Iterator[LogLine]:
        """Yield the lines from the position `start` up to `end`."""
        if start >= end:
            return
        with self._path.open("rb") as stream:
            if not self._is_same(stream):
                return
            while start < end:
                stream.seek(start)
                block = stream.read(min(_MAX_LINE_BYTES, end - start))
                last = block.rfind(b"\n")
                if last >= 0 and start + len(block) < end:
                    block = block[: last + 1]
                if not block:
                    return
                yield from self._lines(block, start)
                start += len(block)

    def _lines(self, block: bytes, start: int) -> list[LogLine]:
        whole = block[:-1] if block.endswith(b"\n") else block
        return parsed(whole.split(b"\n"), start, self._facts, is_json=self.is_json)

    def _first_line(self) -> bytes:
        """Return the first line; empty if it has no end, or a distant one."""
        with self._path.open("rb") as stream:
            if not self._is_same(stream):
                raise FileNotFoundError(self._path)
            line = stream.readline(_FIRST_LINE_BYTES)
        return line if line.endswith(b"\n") else b""

    def _is_same(self, stream: IO[bytes]) -> bool:
        """Return whether an opened file is the listed one, which may have been renamed."""
        return stamp_in(stream).inode == self._stamp.inode


class Log(NamedTuple):
    """The files of one log."""

    name: str
    """Name of its newest file."""
    files: tuple[LogFile, ...]
    """Its files, oldest first."""

    @property
    def component(self) -> str:
        """Name of the component whose log it is, where lines do not say another."""
        return self.files[-1].component

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(one.size for one in self.files)


def logs_of(found: Iterable[Listed]) -> list[Log]:
    """Return the logs that files of a folder belong to, by name; some may just be renamed."""
    by_path = {one.path: one for one in found}
    logs: list[Log] = []
    for log in log_files(by_path):
        files: list[LogFile] = []
        for path in log.paths:
            try:
                files.append(LogFile(by_path[path], is_newest=path == log.paths[-1]))
            except FileNotFoundError:
                continue
        if files:
            logs.append(Log(log.name, tuple(files)))
    return logs


def parsed(lines: Sequence[bytes], start: int, facts: FileFacts, *, is_json: bool) -> list[LogLine]:
    """Return `lines`, which are consecutive in a file from position `start` on.

    A line without a time gets the time of the line before it; the same applies to levels.
    """
    found: list[LogLine] = []
    time_s: float | None = None
    level = "info"
    at = start
    for raw in lines:
        end = at + len(raw) + 1
        text = raw[: 4 * MAX_CHARACTERS].decode("utf-8", "replace").rstrip("\r")
        one = _json_line(text, facts) if is_json else None
        if one is None:
            written_s = _time_in(text[:HEAD], facts)
            time_s = time_s if written_s is None else max(written_s, time_s or 0.0)
            level = level_of(text, level)
            one = LogLine(-1.0, level, facts.component, "", None, text)
        else:
            time_s = max(one.time_s, time_s or 0.0)
        found.append(
            one._replace(
                time_s=-1.0 if time_s is None else time_s,
                message=one.message[:MAX_CHARACTERS],
                start=at,
                end=end,
                is_cut=len(one.message) > MAX_CHARACTERS,
            )
        )
        at = end
    # Lines before the first time get that time, or that of the file if there is none.
    first_s = next((line.time_s for line in found if line.time_s >= 0), facts.mtime_s)
    return [line if line.time_s >= 0 else line._replace(time_s=first_s) for line in found]


def _json_object(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line of JSON; None if it is anything else."""
    try:
        content: object = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], content) if isinstance(content, dict) else None


def _json_line(text: str, facts: FileFacts) -> LogLine | None:
    row = _json_object(text.encode("utf-8", "replace"))
    if row is None:
        return None
    time_s = row.get("time_s")
    if not isinstance(time_s, int | float) or not 0 <= time_s < 1e11:
        return None
    level = LEVEL_WORDS.get(str(row.get("level", "info")).lower(), "info")
    life = row.get("life")
    return LogLine(
        time_s=float(time_s),
        level=level,
        component=str(row.get("component") or facts.component),
        source=str(row.get("source") or ""),
        life=life if isinstance(life, int) and not isinstance(life, bool) else None,
        message=str(row.get("message", "")),
    )


def _time_in(head: str, facts: FileFacts) -> float | None:
    match = WRITTEN_TIME.search(head)
    if match is None:
        return None
    year = int(match[1]) if match[1] else facts.year
    numbers = [int(match[at]) for at in range(2, 7)]
    month, day, hour, minute, second = numbers
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    if not 1970 <= year <= 9999:
        return None
    time_s = calendar.timegm((year, month, day, hour, minute, second))
    fraction = float(f"0.{match[7]}") if match[7] else 0.0
    return time_s + fraction - _zone_s(match[8], facts)


def _zone_s(zone: str | None, facts: FileFacts) -> int:
    if zone is None:
        return facts.utc_offset_s
    if zone == "Z":
        return 0
    digits = zone[1:].replace(":", "")
    offset_s = 3600 * int(digits[:2]) + 60 * int(digits[2:])
    return -offset_s if zone[0] == "-" else offset_s
