"""`StageIndex`: numbers of attempts in each stage over time, for a whole run.

For the rollouts drawn for a step, time is cut into cells. Each cell keeps how many rollouts began
and ended a stage in it, and when, on average. A window sums these up without reading the files of
thousands of steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Condition, Thread
from typing import Any, NamedTuple

import duckdb

from telescope_ui.base.answers import JsonObject
from telescope_ui.files.database import Database
from telescope_ui.files.run_files import Listed
from telescope_ui.index.building import checkpoint
from telescope_ui.index.event_tables import EventStepFile, events_by_step, stages_of, usable
from telescope_ui.index.run_index import RunIndex

WAIT_S = 0.05
"""Longest wait of an answer for new files, in seconds."""
_CELLS = 16
"""Number of cells into which the time of one step's rollouts is divided."""
_BATCH_FILES = 32
_MAX_PROBLEMS = 20
_Key = tuple[int, int, int, int]


class StageChange(NamedTuple):
    """The attempts that began and ended in a bucket of a window."""

    source: str
    name: str
    bucket: int
    number: int
    """Beginnings minus ends."""
    sum_s: float
    """Times of beginnings minus those of ends, from the start of the window."""


class StageIndex:
    """Sums over the stages of all attempts of a run; any thread may ask."""

    def __init__(self, run: Path, index: RunIndex, database: Database) -> None:
        """Store the sums of the run in the resolved folder `run` in the file of its `index`."""
        self._run, self._index, self._database = run, index, database
        self._changed = Condition()
        """Held to access the fields below; notified when more was read."""
        self._is_building = False
        self._is_closed = False
        self._num_done = 0
        self._num_total = 0
        self._problems: list[str] = []

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._is_building, timeout=30)

    def refresh(self, wait_s: float = WAIT_S) -> JsonObject:
        """Read new files, and return the progress, after at most `wait_s`."""
        self._index.refresh(0.0)
        with self._changed:
            if not self._is_building and not self._is_closed and self._index.schema:
                self._begin_if_changed()
            self._changed.wait_for(lambda: not self._is_building, timeout=wait_s)
            return {
                "files_done": self._num_done,
                "files_total": self._num_total,
                "is_complete": not self._is_building,
                "problems": self._problems[:_MAX_PROBLEMS],
            }

    def changes(self, first_s: float, last_s: float, bucket_s: float) -> list[StageChange]:
        """Return the changes in each bucket of a window; earlier ones are in bucket 0."""
        since = "greatest(time_s - ?, 0)"
        sql = (
            f"SELECT source, name, CAST(floor({since} / ?) AS INTEGER) AS b, sum(number), "
            f"sum(number * {since} + CASE WHEN time_s > ? THEN rest_s ELSE 0 END) "
            f"FROM {self._table('stages')} WHERE time_s < ? GROUP BY 1, 2, 3"
        )
        bound = (first_s, bucket_s, first_s, first_s, last_s)
        rows = self._database.rows(sql, bound)
        return [StageChange(a, b, c, int(number), sum_s) for a, b, c, number, sum_s in rows]

    def _table(self, name: str) -> str:
        return f"{self._index.schema}.{name}"

    def _begin_if_changed(self) -> None:
        found = usable(self._database.damage, events_by_step(self._run).values())
        files = {one.step: one for one in found.files}
        self._problems = found.problems
        with self._database.cursor() as cursor:
            _create(cursor, self._index.schema)
            known = _known(cursor, self._index.schema)
        fresh = {step for step, one in files.items() if known.get(step) == _key(one.file)}
        self._num_total, self._num_done = len(files), len(fresh)
        stale = [step for step in known if step not in fresh]
        new = [one for step, one in sorted(files.items(), reverse=True) if step not in fresh]
        if stale or new:
            self._is_building = True
            Thread(target=self._build, args=(stale, new), name="index stages", daemon=True).start()

    def _build(self, stale: Sequence[int], new: Sequence[EventStepFile]) -> None:
        try:
            with self._database.cursor() as cursor:
                _forget(cursor, self._index.schema, stale)
                for start in range(0, len(new), _BATCH_FILES):
                    if self._is_closed:
                        break
                    batch = new[start : start + _BATCH_FILES]
                    self._add(cursor, batch)
                    with self._changed:
                        self._num_done += len(batch)
                checkpoint(cursor, self._index.schema)
        finally:
            with self._changed:
                self._is_building = False
                self._changed.notify_all()

    def _add(self, cursor: duckdb.DuckDBPyConnection, files: Sequence[EventStepFile]) -> None:
        try:
            _add(cursor, self._index.schema, files)
        except duckdb.Error:
            _roll_back(cursor)
            damage = self._database.damage
            damage.find([file for _, file in files])
            damaged = {file: damage.problem(file) for _, file in files}
            whole = [one for one in files if not damaged[one.file]]
            with self._changed:
                self._problems += [problem for problem in damaged.values() if problem]
            if len(whole) < len(files):
                self._add(cursor, whole)


def _create(cursor: duckdb.DuckDBPyConnection, schema: str) -> None:
    cursor.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.stages (step INTEGER, source VARCHAR, name VARCHAR, "
        "time_s DOUBLE, number INTEGER, rest_s FLOAT)"
    )
    cursor.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.stage_files (step INTEGER, is_packed INTEGER, "
        "size BIGINT, mtime_ns BIGINT, inode BIGINT)"
    )


def _key(file: Listed) -> _Key:
    size, mtime_ns, inode = file.stamp
    return int(file.name.endswith(".parquet")), size, mtime_ns, inode


def _known(cursor: duckdb.DuckDBPyConnection, schema: str) -> Mapping[int, _Key]:
    rows: list[Any] = cursor.execute(f"SELECT * FROM {schema}.stage_files").fetchall()
    return {step: (a, b, c, d) for step, a, b, c, d in rows}


def _forget(cursor: duckdb.DuckDBPyConnection, schema: str, steps: Iterable[int]) -> None:
    for table in ("stage_files", "stages"):
        cursor.execute(
            f"DELETE FROM {schema}.{table} WHERE step IN (SELECT unnest(?))", [list(steps)]
        )


def _add(cursor: duckdb.DuckDBPyConnection, schema: str, files: Sequence[EventStepFile]) -> None:
    source = stages_of(files, with_generating=True)
    if source is None:
        return
    middle = f"lo + cell_s * (least(greatest(floor((t - lo) / cell_s), 0), {_CELLS - 1}) + 0.5)"
    cursor.execute("BEGIN")
    cursor.execute(
        f"INSERT INTO {schema}.stages WITH spans AS MATERIALIZED (SELECT step, "
        f"source, name, time_s, time_s + duration_s AS end_s FROM {source.sql} "
        "WHERE duration_s >= 0 AND source IS NOT NULL), bounds AS (SELECT step, min(time_s) AS lo, "
        f"greatest(max(end_s) - min(time_s), 1e-3) / {_CELLS} AS cell_s FROM spans GROUP BY step), "
        "changes AS (SELECT step, source, name, time_s AS t, 1 AS n FROM spans UNION ALL "
        "SELECT step, source, name, end_s, -1 FROM spans) "
        "SELECT step, source, name, at_s, sum(n), sum(n * (t - at_s)) FROM "
        f"(SELECT *, {middle} AS at_s FROM changes JOIN bounds USING (step)) "
        "GROUP BY step, source, name, at_s",
        source.values,
    )
    rows = [(one.step, *_key(one.file)) for one in files]
    cursor.execute(
        f"INSERT INTO {schema}.stage_files "
        "SELECT unnest(?), unnest(?), unnest(?), unnest(?), unnest(?)",
        [*map(list, zip(*rows, strict=True))],
    )
    cursor.execute("COMMIT")


def _roll_back(cursor: duckdb.DuckDBPyConnection) -> None:
    try:
        cursor.execute("ROLLBACK")
    except duckdb.TransactionException:
        # The statement has ended the transaction already.
        return
