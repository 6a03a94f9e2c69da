"""Parse lines of log files with time and level: text of programs, and JSON lines. Pure."""

import calendar
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from telescope_core.records.logs import HEAD, LEVEL_WORDS, WRITTEN_TIME, level_of

MAX_CHARACTERS = 16_384
LEVELS = ("debug", "info", "warning", "error")


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


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line of JSON; None if it is anything else."""
    try:
        content: object = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], content) if isinstance(content, dict) else None


def _json_line(text: str, facts: FileFacts) -> LogLine | None:
    row = json_object(text.encode("utf-8", "replace"))
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
