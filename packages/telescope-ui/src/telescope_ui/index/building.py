"""Read step files into the tables of an index, in batches.

Everything that a statement changes is one transaction, so an index is whole after a kill.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import duckdb

from telescope_core.base.errors import ConfigError
from telescope_core.records.step_files import merged_path, rows_in, step_path
from telescope_ui.files.damage import left_out, unreadable, with_details
from telescope_ui.files.database import quoted
from telescope_ui.files.run_files import Listed, literal_paths, named, step_of
from telescope_ui.index.block_tables import Source
from telescope_ui.index.columns import (
    MAX_ERROR_CHARACTERS,
    MAX_NAMED,
    NAMED,
    PLACE,
    PLAIN,
    Column,
    named_columns,
)

FOLDERS = {"rollouts": False, "attempts": True}
"""Folder -> whether its rows were replaced by later attempts."""
BATCH_FILES = 128
_EVERY_ROW = range(2**31 - 1)
_MANY = re.compile(r"steps-(\d+)-\d+\.parquet")
_BATCH = "temp.batch"


class StepFile(NamedTuple):
    """Location of the rows of a step in one of `FOLDERS`: its own file, or one of many steps."""

    folder: str
    step: int
    file: Listed
    rows: range = _EVERY_ROW
    """Rows of the step in the file."""


def create_tables(cursor: duckdb.DuckDBPyConnection, schema: str) -> None:
    """Create the tables that are missing."""
    columns = ", ".join(f"{quoted(c.name)} {c.type}" for c in (*PLAIN, *PLACE))
    cursor.execute(f"CREATE TABLE IF NOT EXISTS {schema}.rollouts ({columns})")
    cursor.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.files (folder VARCHAR, step INTEGER, size BIGINT, "
        "mtime_ns BIGINT, inode BIGINT, problem VARCHAR)"
    )
    cursor.execute(
        f"CREATE TABLE IF NOT EXISTS {schema}.groups (step INTEGER, environment VARCHAR, "
        "group_id VARCHAR, count INTEGER, mean DOUBLE, minimum DOUBLE, maximum DOUBLE)"
    )


def known_files(
    cursor: duckdb.DuckDBPyConnection, schema: str
) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Return the stamps of the indexed files, by folder and step."""
    rows = cursor.execute(f"SELECT folder, step, size, mtime_ns, inode FROM {schema}.files")
    return {(folder, step): (a, b, c) for folder, step, a, b, c in rows.fetchall()}


def forget(
    cursor: duckdb.DuckDBPyConnection, schema: str, files: Sequence[tuple[str, int]]
) -> None:
    """Remove rows from files that have gone or changed."""
    for folder in FOLDERS:
        steps = [step for name, step in files if name == folder]
        if not steps:
            continue
        cursor.execute("BEGIN")
        cursor.execute(
            f"DELETE FROM {schema}.files WHERE folder = ? AND step IN (SELECT unnest(?))",
            [folder, steps],
        )
        cursor.execute(
            f"DELETE FROM {schema}.rollouts WHERE is_replaced = ? AND step IN (SELECT unnest(?))",
            [FOLDERS[folder], steps],
        )
        if folder == "rollouts":
            cursor.execute(f"DELETE FROM {schema}.groups WHERE step IN (SELECT unnest(?))", [steps])
        cursor.execute("COMMIT")


def batches(files: Sequence[StepFile]) -> Iterator[list[StepFile]]:
    """Yield the files of one folder at a time, newest step first."""
    for folder in FOLDERS:
        own = sorted((f for f in files if f.folder == folder), key=lambda f: -f.step)
        for start in range(0, len(own), BATCH_FILES):
            yield from by_file(own[start : start + BATCH_FILES])


def by_file(files: Sequence[StepFile]) -> list[list[StepFile]]:
    """Return the steps with files of their own together, and those of each file of many apart.

    A query passes over the row groups outside the first and the last row that it needs of any of
    its files, so with two files of many steps it would decode both from end to end.
    """
    found: dict[str, list[StepFile]] = {}
    for one in files:
        found.setdefault("" if one.rows == _EVERY_ROW else one.file.name, []).append(one)
    return list(found.values())


def add(cursor: duckdb.DuckDBPyConnection, schema: str, files: Sequence[StepFile]) -> None:
    """Read `files`, all of one folder; unreadable ones are recorded as problems."""
    try:
        _add_together(cursor, schema, files)
    except duckdb.Error as error:
        # The statement may have ended the transaction already.
        with suppress(duckdb.TransactionException):
            cursor.execute("ROLLBACK")
        if len(files) == 1:
            (one,) = files
            reason = with_details(unreadable(one.file.name), error)
            _insert_files(cursor, schema, files, left_out(one.folder, one.file.name, reason))
            return
        half = len(files) // 2
        add(cursor, schema, files[:half])
        add(cursor, schema, files[half:])


def _add_together(
    cursor: duckdb.DuckDBPyConnection, schema: str, files: Sequence[StepFile]
) -> None:
    cursor.execute("BEGIN")
    # Read once, as the files are looked at several times: what members there are, and their values.
    wanted = [*(column.name for column in PLAIN), *NAMED, "of_step", "of_row"]
    source = rows_of(files)
    cursor.execute(
        f"CREATE OR REPLACE TEMP TABLE {_BATCH} AS SELECT COLUMNS(lambda c: list_contains(?, c)) "
        f"FROM {source.sql}",
        [wanted, *source.values],
    )
    present = {row[0] for row in cursor.execute(f"DESCRIBE {_BATCH}").fetchall()}
    new = _named(cursor, schema, present)
    chosen = [f"{_scalar(c.name, c.type, present)} AS {quoted(c.name)}" for c in PLAIN]
    objects = ", ".join(f"json_extract_string({kind}, ${kind}) AS {kind}_values" for kind in new)
    members = [
        f"TRY_CAST({kind}_values[{at}] AS {NAMED[kind]}) AS {quoted(f'{kind}/{name}')}"
        for kind, names in new.items()
        for at, name in enumerate(names, 1)
    ]
    replaced = "true" if FOLDERS[files[0].folder] else "false"
    inner = f"SELECT *{', ' if objects else ''}{objects} FROM {_BATCH}"
    cursor.execute(
        f"INSERT INTO {schema}.rollouts BY NAME SELECT {', '.join(chosen + members)}, "
        f'{replaced} AS is_replaced, of_row AS "row" FROM ({inner})',
        {kind: [_pointer(name) for name in names] for kind, names in new.items()},
    )
    cursor.execute(f"DROP TABLE {_BATCH}")
    _insert_files(cursor, schema, files, "")
    if not FOLDERS[files[0].folder]:
        cursor.execute(
            f"INSERT INTO {schema}.groups SELECT step, environment, group_id, count(reward), "
            f"avg(reward), min(reward), max(reward) FROM {schema}.rollouts "
            "WHERE NOT is_replaced AND step IN (SELECT unnest(?)) AND reward IS NOT NULL "
            "GROUP BY step, environment, group_id",
            [[one.step for one in files]],
        )
    cursor.execute("COMMIT")


def _pointer(name: str) -> str:
    """Return the JSON pointer to a member (RFC 6901)."""
    return f"/{name.replace('~', '~0').replace('/', '~1')}"


def _scalar(name: str, kind: str, present: set[str]) -> str:
    if name == "step":
        return "of_step"
    if name not in present:
        return "1" if name == "attempt" else f"CAST(NULL AS {kind})"
    if name == "attempt":
        # A file of an earlier version, among later ones.
        return "coalesce(attempt, 1)"
    if name == "error":
        return f"left(error, {MAX_ERROR_CHARACTERS})"
    return f"CAST({quoted(name)} AS {kind})"


def _named(
    cursor: duckdb.DuckDBPyConnection, schema: str, present: set[str]
) -> dict[str, list[str]]:
    """Return the members of JSON objects in the batch, and add columns for new ones."""
    known = {column.name for column in existing_columns(cursor, schema)}
    found: dict[str, list[str]] = {}
    for kind, type_ in NAMED.items():
        if kind not in present:
            continue
        keys = f"SELECT DISTINCT unnest(json_keys({kind})) FROM {_BATCH}"
        names = sorted(row[0] for row in cursor.execute(keys).fetchall())
        used = sum(name.startswith(f"{kind}/") for name in known)
        taken: list[str] = []
        lower = {name.lower() for name in known}
        for name in names:
            column = f"{kind}/{name}"
            if column in known:
                taken.append(name)
            # Names that differ in case only are one column to DuckDB; the first one has it.
            elif used < MAX_NAMED and column.lower() not in lower and "\0" not in name:
                cursor.execute(f"ALTER TABLE {schema}.rollouts ADD COLUMN {quoted(column)} {type_}")
                used += 1
                lower.add(column.lower())
                taken.append(name)
        if taken:
            found[kind] = taken
    return found


def existing_columns(cursor: duckdb.DuckDBPyConnection, schema: str) -> list[Column]:
    """Return the columns by which rollouts can be filtered and sorted."""
    rows = cursor.execute(f"DESCRIBE {schema}.rollouts").fetchall()
    return [*PLAIN, PLACE[0], *named_columns([row[0] for row in rows])]


def _insert_files(
    cursor: duckdb.DuckDBPyConnection, schema: str, files: Sequence[StepFile], problem: str
) -> None:
    # As lists, because a statement for each of thousands of steps takes longer than their rows.
    rows = [(one.folder, one.step, *one.file.stamp) for one in files]
    cursor.execute(
        f"INSERT INTO {schema}.files SELECT unnest(?), unnest(?), unnest(?), unnest(?), "
        "unnest(?), ?",
        [*map(list, zip(*rows, strict=True)), problem],
    )


def checkpoint(cursor: duckdb.DuckDBPyConnection, schema: str) -> None:
    """Move new data into the file itself; no other thread may be writing to it."""
    with suppress(duckdb.TransactionException):
        cursor.execute(f"CHECKPOINT {schema}")


def step_files(folder: str, found: Iterable[Listed]) -> dict[int, StepFile]:
    """Return the location of each step in the files `found`."""
    single: dict[int, StepFile] = {}
    merged: dict[int, StepFile] = {}
    for file in found:
        step = step_of(file.name)
        if step is None:
            steps = _rows_of_steps(file).items()
            merged |= {step: StepFile(folder, step, file, rows) for step, rows in steps}
        elif file.name == step_path(file.folder, step).name:
            single[step] = StepFile(folder, step, file)
    # Where a step has a file of its own, that one counts.
    return merged | single


def files_of(run: Path, folder: str, steps: Sequence[int]) -> list[StepFile]:
    """Return the locations of those of `steps` with rows in a folder of the resolved `run`."""
    names = [path(run, step).name for step in steps for path in (step_path, merged_path)]
    found = step_files(folder, named(run, folder, names=dict.fromkeys(names)))
    return [found[step] for step in steps if step in found]


def rows_of(files: Sequence[StepFile]) -> Source:
    """Return all columns of the rows in `files`, which are of one folder, and two more.

    `of_step` and `of_row` are the step of a row and its number in it, by which it is found again.
    """
    paths = list(dict.fromkeys(one.file.path for one in files))
    return Source(
        sql="(SELECT * EXCLUDE (of_file, first_row, past_row), "
        "CAST(file_row_number - first_row AS INTEGER) AS of_row FROM "
        "read_parquet(?, file_row_number = true, filename = true, union_by_name = true) JOIN "
        "(SELECT unnest(?) AS of_file, CAST(unnest(?) AS INTEGER) AS of_step, "
        "unnest(?) AS first_row, unnest(?) AS past_row) ON parse_filename(filename) = of_file "
        "AND file_row_number >= first_row AND file_row_number < past_row)",
        values=(
            literal_paths(paths),
            [one.file.name for one in files],
            [one.step for one in files],
            [one.rows.start for one in files],
            [one.rows.stop for one in files],
        ),
    )


@lru_cache(maxsize=1024)
def _rows_of_steps(file: Listed) -> Mapping[int, range]:
    """Return the rows of each step in a file of many; `stamp` identifies its content."""
    match = _MANY.fullmatch(file.name)
    if match is None:
        return {}
    try:
        return rows_in(file.path)
    except ConfigError:
        # The readers of the file report the damage.
        return {int(match[1]): _EVERY_ROW}
