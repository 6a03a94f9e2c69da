"""Search in all text of conversations: newest step first, with a time limit."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.files.database import quoted
from telescope_ui.index.building import StepFile, by_file, files_of, rows_of
from telescope_ui.index.filters import Condition
from telescope_ui.index.queries import as_columns
from telescope_ui.index.run_index import RunIndex

LIMIT_S = 0.5
"""Longest search of one answer, in seconds."""
_FIRST_FILES = 4
_MOST_FILES = 64
_EXCERPT = 200
_SAID = (
    "flatten(list_transform(messages, lambda m: [coalesce(m.content, ''), "
    "coalesce(m.reasoning_content, ''), CASE WHEN m.tool_calls = '[]' THEN '' "
    "ELSE coalesce(m.tool_calls, '') END]))"
)
"""All texts of a row's messages, in SQL, including thinking and tool calls as JSON."""


def excerpt(text: str, wanted: str) -> str:
    """Return the part of `text` around `wanted`, which is in lower case and is in it."""
    start = max(0, text.lower().find(wanted) - _EXCERPT // 3)
    return text[start : start + _EXCERPT]


class Cursor(NamedTuple):
    """Point at which a search continues: a step, and the number of its hits so far."""

    step: int
    seen: int

    @classmethod
    def from_text(cls, text: str) -> "Cursor":
        """Return the cursor in `text`; raises ParameterError."""
        match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", text)
        if match is None:
            raise ParameterError(f"cursor: expected next_cursor of an answer, got {text!r}")
        return cls(int(match[1]), int(match[2]))


class Searched(NamedTuple):
    """Hits of a search, and its progress."""

    columns: JsonObject
    search: JsonObject


class Search:
    """One search for `text` among the rollouts that meet `condition`."""

    def __init__(self, index: RunIndex, run: Path, *, condition: Condition, text: str) -> None:
        """Search in the run in the resolved folder `run`, ignoring case."""
        self._index, self._run = index, run
        self._condition = condition
        self._text = text.lower()

    def page(self, *, limit: int, cursor: Cursor | None, limit_s: float = LIMIT_S) -> Searched:
        """Return the next `limit` hits, or fewer when `limit_s` has passed."""
        names = list(self._index.columns())
        steps = self._steps(cursor)
        deadline_s = time.monotonic() + limit_s
        hits: list[tuple[Any, ...]] = []
        # A search without a hit so far continues in large parts, because each part has a cost.
        size = _FIRST_FILES if cursor is None or cursor.seen else _MOST_FILES
        at = 0
        following: Cursor | None = None
        while at < len(steps) and following is None:
            part = steps[at : at + size]
            found = self._hits(part, names)
            if cursor is not None and part[0] == cursor.step:
                same = sum(row[0] == cursor.step for row in found)
                found = found[min(cursor.seen, same) :]
            room = limit - len(hits)
            if len(found) > room:
                last = found[room - 1]
                same = sum(row[0] == last[0] for row in found[:room])
                before = cursor.seen if cursor is not None and cursor.step == last[0] else 0
                following = Cursor(last[0], same + before)
                found = found[:room]
            hits += found
            at += len(part)
            size = min(_MOST_FILES, 2 * size)
            if (
                following is None
                and at < len(steps)
                and (len(hits) == limit or time.monotonic() > deadline_s)
            ):
                following = Cursor(steps[at], 0)
        if following is not None:
            at = sum(step > following.step - (following.seen > 0) for step in steps)
        columns = as_columns([*names, "excerpt"], [row[1:] for row in hits])
        progress: JsonObject = {
            "next_cursor": None if following is None else f"{following.step}.{following.seen}",
            "steps_searched": [steps[at - 1], steps[0]] if at else None,
            "is_complete": following is None,
        }
        return Searched(columns, progress)

    def _steps(self, cursor: Cursor | None) -> list[int]:
        """Return the steps with rollouts that meet the condition, newest first."""
        sql = f"SELECT DISTINCT step FROM {{rollouts}} WHERE {self._condition.sql}"
        steps = sorted(row[0] for row in self._index.rows(sql, self._condition.values))
        return [step for step in reversed(steps) if cursor is None or step <= cursor.step]

    def _hits(self, steps: Sequence[int], names: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return (step, columns ..., excerpt) of all hits in `steps`, in order."""
        found: list[tuple[Any, ...]] = []
        for folder, is_replaced in (("rollouts", False), ("attempts", True)):
            for _ in range(2):
                files = files_of(self._run, folder, steps)
                try:
                    hits = [
                        self._in_files(some, names, is_replaced=is_replaced)
                        for some in by_file(files)
                    ]
                    found += [hit for some in hits for hit in some]
                    break
                except duckdb.IOException:
                    # Files are deleted under the search, when they were merged or when the run
                    # goes back, and then there are others or none.
                    continue
        order = {name: at + 1 for at, name in enumerate(names)}
        keys = [order[name] for name in ("environment", "group_id", "index", "attempt")]
        return sorted(found, key=lambda row: (-row[0], *(row[key] for key in keys)))

    def _in_files(
        self, files: Sequence[StepFile], names: Sequence[str], *, is_replaced: bool
    ) -> list[tuple[Any, ...]]:
        source = rows_of(files)
        sql = (
            "WITH texts AS (SELECT of_step AS said_step, of_row AS said_row, "
            f"{_SAID} AS said FROM {source.sql}), "
            "said AS MATERIALIZED (SELECT said_step, said_row, "
            "list_filter(said, lambda m: contains(lower(m), ?))[1] AS hit "
            "FROM texts WHERE hit IS NOT NULL) "
            f"SELECT step, {', '.join(map(quoted, names))}, "
            f"substr(hit, greatest(1, instr(lower(hit), ?) - {_EXCERPT // 3}), {_EXCERPT}) "
            "FROM said JOIN (SELECT * FROM {rollouts} WHERE step BETWEEN (SELECT min(said_step) "
            f"FROM said) AND (SELECT max(said_step) FROM said) AND is_replaced = {is_replaced} "
            f"AND {self._condition.sql}) ON said_step = step AND said_row = row"
        )
        values = [*source.values, self._text, self._text, *self._condition.values]
        return self._index.rows(sql, values)
