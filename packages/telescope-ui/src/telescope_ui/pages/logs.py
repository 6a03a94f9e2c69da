"""`/runs/{run}/logs`: the logs of all components, merged by time, in both directions."""

import base64
import heapq
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from telescope_core.base.decoders import json_decoder
from telescope_core.records.logs import last_life
from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.base.parameters import LogsParameters
from telescope_ui.base.wrong_addresses import unfit
from telescope_ui.files.logs import LEVELS, Log, LogLine, logs_of
from telescope_ui.files.run_files import Listed, listed
from telescope_ui.index.one_run import OneRun

LIMIT_S = 0.5
"""Longest search of one answer, in seconds."""
_MAX_FILES = 500
_MAX_LIVES = 1000
_COLUMNS = ("time_s", "level", "component", "source", "life", "message")


class _Part(NamedTuple):
    """Lines of a page, and the positions at which to continue."""

    lines: list[LogLine]
    older: str | None
    newer: str
    is_cut: bool
    reached_s: float | None = None
    """Time of the oldest line that was searched, if older ones were requested."""


def logs_page(run: OneRun, asked: LogsParameters) -> JsonObject:
    """Return a page of log lines, oldest first."""
    files = listed(run.path, "logs", suffixes=(".log", ".jsonl"))[:_MAX_FILES]
    logs = logs_of(files)
    cursor = _cursor(asked.cursor)
    read = _newer if asked.direction == "newer" and cursor else _older
    lines, older, newer, is_cut, reached_s = read(logs, asked, cursor)
    origins = [file.origin for log in logs for file in log.files if file.origin is not None]
    sources = {one.source for one in origins} | {line.source for line in lines}
    # Numbers that other programs write there may be of any size.
    newest = max((life for life in map(_newest_life, files) if life <= _MAX_LIVES), default=0)
    columns = {name: [getattr(line, name) for line in lines] for name in _COLUMNS}
    known = {log.component for log in logs} | {line.component for line in lines}
    return {
        "page": "logs",
        "run": run.brief(),
        "components": [
            {"name": log.component, "file": log.name, "bytes": log.size} for log in logs
        ],
        "sources": sorted(filter(None, sources)),
        "lives": sorted(
            {*range(1, newest + 1), *(one.life for one in lines if one.life is not None)}
        ),
        "lines": {"columns": columns},
        "older": older,
        "newer": newer,
        "is_cut": is_cut or any(line.is_cut for line in lines),
        "reached_s": reached_s,
        "hints": list(unfit({"component": asked.component}, {"component": known})),
    }


@lru_cache(maxsize=4096)
def _newest_life(file: Listed) -> int:
    """Return the number of the last start in a log; `stamp` identifies the file's content."""
    return last_life(file.path) if file.name.endswith(".jsonl") else 0


def _older(logs: Sequence[Log], asked: LogsParameters, cursor: dict[str, int]) -> _Part:
    files = [file for log in logs for file in log.files]
    # A file that a cursor does not know began after it.
    ends = {
        file.key: min(cursor.get(file.key, 0), file.size) if cursor else file.end()
        for file in files
    }
    newer = _text_of({**cursor, **ends})
    searched = [log for log in logs if _may_hold(log, asked)]
    streams = [_backwards(log, dict(ends)) for log in searched]
    kept: list[LogLine] = []
    deadline_s = time.monotonic() + LIMIT_S
    is_cut = False
    reached_s: float | None = None
    for key, line in heapq.merge(*streams, key=lambda one: -one[1].time_s):
        # However slow the disk is, an answer gets on by one line.
        is_cut = reached_s is not None and time.monotonic() > deadline_s
        if is_cut or len(kept) == asked.limit:
            break
        ends[key], reached_s = line.start, line.time_s
        if _is_asked(line, asked):
            kept.append(line)
    kept.reverse()
    has_more = any(ends[file.key] for log in searched for file in log.files)
    older = _text_of({**cursor, **ends}) if has_more else None
    return _Part(kept, older, newer, is_cut, reached_s)


def _newer(logs: Sequence[Log], asked: LogsParameters, cursor: dict[str, int]) -> _Part:
    files = {file.key: file for log in logs for file in log.files}
    # A file that is shorter than it was has been written anew.
    starts = {
        key: place if (place := cursor.get(key, 0)) <= file.size else 0
        for key, file in files.items()
    }
    older = _text_of({**cursor, **starts})
    searched = [log for log in logs if _may_hold(log, asked)]
    streams = [_forwards(log, dict(starts)) for log in searched]
    kept: list[LogLine] = []
    deadline_s = time.monotonic() + LIMIT_S
    is_cut = False
    for number, (key, line) in enumerate(heapq.merge(*streams, key=lambda one: one[1].time_s)):
        # As above.
        is_cut = len(kept) == asked.limit or (number > 0 and time.monotonic() > deadline_s)
        if is_cut:
            break
        starts[key] = min(line.end, files[key].size)
        if _is_asked(line, asked):
            kept.append(line)
    return _Part(
        kept, older if any(cursor.values()) else None, _text_of({**cursor, **starts}), is_cut
    )


def _backwards(log: Log, ends: dict[str, int]) -> Iterator[tuple[str, LogLine]]:
    for file in reversed(log.files):
        for line in file.backwards(ends[file.key]):
            yield file.key, line


def _forwards(log: Log, starts: dict[str, int]) -> Iterator[tuple[str, LogLine]]:
    for file in log.files:
        for line in file.forwards(starts[file.key], file.end()):
            yield file.key, line


def _may_hold(log: Log, asked: LogsParameters) -> bool:
    """Return whether a log may have requested lines, judging by its first line."""
    for file in log.files:
        origin = file.origin
        if origin is None:
            return True
        is_component = not asked.component or origin.component in asked.component
        if is_component and (not asked.source or origin.source in asked.source):
            return True
    return False


def _is_asked(line: LogLine, asked: LogsParameters) -> bool:
    if asked.component and line.component not in asked.component:
        return False
    if asked.source and line.source not in asked.source:
        return False
    if asked.life and line.life not in asked.life:
        return False
    if asked.level and LEVELS.index(line.level) < LEVELS.index(asked.level):
        return False
    return not asked.q or asked.q.lower() in line.message.lower()


def _text_of(places: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(places)).decode().rstrip("=")


def _cursor(text: str) -> dict[str, int]:
    if not text:
        return {}
    try:
        content = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        found = json_decoder(dict[str, int]).decode(content)
    except ValueError:
        raise ParameterError(
            f"cursor: expected older or newer of an answer, got {text[:40]!r}"
        ) from None
    return {name: max(0, place) for name, place in found.items()}
