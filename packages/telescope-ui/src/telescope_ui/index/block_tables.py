"""Block logs of a run (`calls/`, `timeline/`, `gauges/`) as SQL tables, read in place.

Full blocks are Parquet files. The open block, which is lines of JSON, is read with a limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from telescope_core.records.blocks import block_names
from telescope_core.records.files import lines_left_out
from telescope_core.records.row_log import column_types
from telescope_core.records.timeline import (
    CALLS_FOLDER,
    GAUGES_FOLDER,
    TIMELINE_FOLDER,
    GaugeSample,
    ModelCall,
    TimelineSpan,
)
from telescope_ui.files.damage import Damage, lines_table
from telescope_ui.files.database import Database, quoted
from telescope_ui.files.run_files import Listed, listed, literal_paths

_KINDS: Mapping[str, type[Any]] = {
    CALLS_FOLDER: ModelCall,
    TIMELINE_FOLDER: TimelineSpan,
    GAUGES_FOLDER: GaugeSample,
}
_TYPES = {float: "DOUBLE", int: "BIGINT", str: "VARCHAR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A table in SQL, in brackets, and its bound values."""

    sql: str
    values: tuple[object, ...]


def block_source(damage: Damage, run: Path, folder: str, columns: Sequence[str]) -> Source | None:
    """Return `columns` of a block log as a source of rows; None if the run has no such log.

    A file that cannot be read is left out; `block_problems` names it.
    """
    return source_of(damage, folder, block_files(run, folder), columns)


def block_problems(damage: Damage, run: Path, *folders: str) -> list[str]:
    """Return problems of block log files that are left out, each as a sentence."""
    files = [one for folder in folders for one in block_files(run, folder)]
    return [problem for one in files if (problem := damage.problem(one))]


def incomplete_lines(database: Database, run: Path, folder: str) -> list[str]:
    """Return a sentence about each file of a block log with lines that lack a needed field."""
    kind, found = _KINDS[folder], list[str]()
    for file in block_files(run, folder):
        if file.name.endswith(".jsonl") and not database.damage.problem(file):
            # A line without a time may still be being written.
            sql = (
                f"SELECT count(*) FROM {lines_table(_sql_types(kind))} "
                f"WHERE time_s IS NOT NULL AND NOT ({_is_whole(kind)})"
            )
            ((num_lines,),) = database.rows(sql, [literal_paths([file.path])])
            found += [lines_left_out(f"{folder}/{file.name}", num_lines)] if num_lines else []
    return found


def source_of(
    damage: Damage, folder: str, files: Sequence[Listed], columns: Sequence[str]
) -> Source | None:
    """Return `columns` of some files of a block log; None if none of them can be read."""
    names = list(dict.fromkeys(columns))
    kind = _KINDS[folder]
    types = _sql_types(kind)
    whole = [one for one in files if one.stamp.size and not damage.problem(one)]
    packed = [one for one in whole if one.name.endswith(".parquet")]
    lines = [one for one in whole if one.name.endswith(".jsonl")]
    parts: list[str] = []
    values: list[object] = []
    chosen = ", ".join(f"CAST({quoted(n)} AS {types[n]}) AS {quoted(n)}" for n in names)
    if packed:
        parts.append(f"SELECT {chosen} FROM read_parquet(?, union_by_name = true)")
        values.append(literal_paths([one.path for one in packed]))
    if lines:
        parts.append(rows_of_lines(kind, names))
        values.append(literal_paths([one.path for one in lines]))
    if not parts:
        return None
    return Source(sql=f"({' UNION ALL '.join(parts)})", values=tuple(values))


def block_files(run: Path, folder: str) -> list[Listed]:
    """Return the files of a block log; for a block in two forms, the packed one."""
    found = {one.name: one for one in listed(run, folder, suffixes=(".parquet", ".jsonl"))}
    return [found[name] for name in block_names(found)]


def _sql_types(kind: type[Any]) -> dict[str, str]:
    """Return the type in SQL of each field of the rows `kind`."""
    return {name: _TYPES[one] for name, one in column_types(kind).items()}


def rows_of_lines(kind: type[Any], names: Sequence[str]) -> str:
    """Return the fields `names` of rows in files of lines as a query, to which paths are bound.

    Fields that have their default are left out of lines, and are filled in here.
    """
    types = _sql_types(kind)
    chosen: list[str] = []
    for name in names:
        column, default = quoted(name), kind.__dataclass_fields__[name].default
        if isinstance(default, str):
            filled = f"coalesce({column}, '{default}')"
        elif isinstance(default, int | float):
            filled = f"coalesce({column}, {default})"
        else:
            filled = f"CAST({column} AS {types[name]})"
        chosen.append(f"{filled} AS {column}")
    return f"SELECT {', '.join(chosen)} FROM {lines_table(types)} WHERE {_is_whole(kind)}"


def _is_whole(kind: type[Any]) -> str:
    """Return the condition that a line has every field without a default."""
    fields = kind.__dataclass_fields__.values()
    required = [one.name for one in fields if one.default is MISSING]
    return " AND ".join(f"{quoted(name)} IS NOT NULL" for name in required)
