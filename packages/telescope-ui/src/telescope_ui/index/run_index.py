"""`RunIndex`: the index of one run, which follows the files of its steps.

A thread reads new files. A caller waits for it a moment, and then gets the rows that are there.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Condition, Thread
from typing import Any

from telescope_core.base.errors import unknown_name
from telescope_ui.base.answers import JsonObject, ParameterError
from telescope_ui.files.database import Database
from telescope_ui.files.run_files import Stamp, listed, stamp_of_folder
from telescope_ui.index import building
from telescope_ui.index.columns import Column

WAIT_S = 2.0
"""Longest wait of an answer for the index, before it reports an incomplete one."""
_MAX_PROBLEMS = 20
_TICK_S = 2.0


class RunIndex:
    """Scalars of all rollouts of a run; any thread may ask."""

    def __init__(self, run: Path, database: Database) -> None:
        """Index the run in the resolved folder `run`; nothing is read before `refresh`."""
        self._run = run
        self._database = database
        self._changed = Condition()
        """Held to access the fields below; notified when the thread has read more."""
        self._schema = ""
        self._seen: list[Stamp | None] | None = None
        """Stamps of the folders at the time when all of their files were known."""
        self._is_building = False
        self._is_closed = False
        self._num_done = 0
        self._num_total = 0
        self._columns: tuple[Column, ...] = ()
        self._remembered: dict[str, tuple[int, JsonObject]] = {}
        """Cached answers by name, with the generation that they belong to."""
        self.generation = 0
        """Number that grows with every change of the index."""

    @property
    def schema(self) -> str:
        """Name of the schema in the database."""
        return self._schema

    def close(self) -> None:
        """Stop reading, and close the file."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._is_building, timeout=30)
            if self._schema:
                self._database.detach(self._schema)
                self._schema = ""

    def refresh(self, wait_s: float = WAIT_S) -> JsonObject:
        """Read new files, and return the progress of the index, after at most `wait_s`."""
        with self._changed:
            if not self._is_building and not self._is_closed:
                self._open()
                self._begin_if_changed()
            self._changed.wait_for(lambda: not self._is_building, timeout=wait_s)
            return {
                "files_done": self._num_done,
                "files_total": self._num_total,
                "is_complete": not self._is_building,
                "problems": self._problems(),
            }

    def columns(self) -> dict[str, Column]:
        """Return the columns by which rollouts can be filtered and sorted, by name."""
        return {column.name: column for column in self._columns}

    def column(self, name: str) -> Column:
        """Return a column; for an unknown one, raises ParameterError that names the nearest."""
        known = self.columns()
        if name not in known:
            raise ParameterError(str(unknown_name("column", name, list(known))))
        return known[name]

    def rows(self, sql: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[Any]:
        """Return the rows of a query, in which `{rollouts}` and the like name the tables."""
        tables = {name: f"{self._schema}.{name}" for name in ("rollouts", "groups", "files")}
        for name, table in tables.items():
            sql = sql.replace(f"{{{name}}}", table)
        return self._database.rows(sql, values)

    def remembered(self, name: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """Return the result of `compute`, cached until the index changes."""
        with self._changed:
            generation = self.generation
            known = self._remembered.get(name)
        if known is None or known[0] != generation:
            known = (generation, compute())
            with self._changed:
                self._remembered[name] = known
        return known[1]

    def _open(self) -> None:
        if not self._schema:
            self._schema = self._database.attach(self._run)
            with self._database.cursor() as cursor:
                building.create_tables(cursor, self._schema)
                # Files that could not be read are tried again, because the cause may be gone.
                cursor.execute(f"DELETE FROM {self._schema}.files WHERE problem != ''")
                self._columns = tuple(building.existing_columns(cursor, self._schema))

    def _begin_if_changed(self) -> None:
        # Files of steps are only ever put in place or removed, which the folder's time tells.
        before = time.time()
        signs = [stamp_of_folder(self._run, folder) for folder in building.FOLDERS]
        if signs == self._seen:
            return
        files = self._on_disk()
        if self._changes(files):
            self._is_building = True
            Thread(target=self._build, args=(files,), name="index", daemon=True).start()
        # A change within the same tick of the file system's clock leaves the same time.
        is_settled = all(sign is None or before - sign.mtime_ns / 1e9 > _TICK_S for sign in signs)
        self._seen = signs if is_settled else None

    def _on_disk(self) -> dict[tuple[str, int], building.StepFile]:
        return {
            (folder, step): one
            for folder in building.FOLDERS
            for step, one in building.step_files(
                folder, listed(self._run, folder, suffixes=(".parquet",))
            ).items()
        }

    def _changes(self, files: Mapping[tuple[str, int], building.StepFile]) -> bool:
        with self._database.cursor() as cursor:
            known = building.known_files(cursor, self._schema)
        self._num_total = len(files)
        self._num_done = sum(
            key in files and tuple(files[key].file.stamp) == stamp for key, stamp in known.items()
        )
        return self._num_done != len(files) or len(known) != len(files)

    def _build(self, files: Mapping[tuple[str, int], building.StepFile]) -> None:
        try:
            with self._database.cursor() as cursor:
                known = building.known_files(cursor, self._schema)
                stale = [
                    key
                    for key, stamp in known.items()
                    if key not in files or tuple(files[key].file.stamp) != stamp
                ]
                if stale:
                    building.forget(cursor, self._schema, stale)
                    self._report(cursor, 0)
                fresh = set(known) - set(stale)
                new = [one for key, one in files.items() if key not in fresh]
                for batch in building.batches(new):
                    if self._is_closed:
                        break
                    building.add(cursor, self._schema, batch)
                    self._report(cursor, len(batch))
                building.checkpoint(cursor, self._schema)
        except BaseException:
            self._seen = None
            raise
        finally:
            with self._changed:
                self._is_building = False
                self._changed.notify_all()

    def _report(self, cursor: Any, num: int) -> None:
        columns = tuple(building.existing_columns(cursor, self._schema))
        with self._changed:
            self._columns = columns
            self._num_done += num
            self.generation += 1
            self._changed.notify_all()

    def _problems(self) -> list[str]:
        if not self._schema:
            return []
        sql = (
            "SELECT problem FROM {files} WHERE problem != '' GROUP BY problem "
            "ORDER BY max(step) DESC LIMIT ?"
        )
        return [row[0] for row in self.rows(sql, [_MAX_PROBLEMS])]
