"""Block logs of a run (`calls/`, `timeline/`, `gauges/`) as SQL tables, read in place.

Full blocks are Parquet files. The open block, which is lines of JSON, is read with a limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from telescope_core.records.timeline import (
    CALLS_FOLDER,
    GAUGES_FOLDER,
    TIMELINE_FOLDER,
    GaugeSample,
    ModelCall,
    TimelineSpan,
)
from telescope_ui.files.damage import MAX_LINE_BYTES, Damage
from telescope_ui.files.database import quoted
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


def source_of(
    damage: Damage, folder: str, files: Sequence[Listed], columns: Sequence[str]
) -> Source | None:
    """Return `columns` of some files of a block log; None if none of them can be read."""
    names = list(dict.fromkeys(columns))
    types = _column_types(_KINDS[folder])
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
        schema = ", ".join(f"{quoted(n)}: '{kind}'" for n, kind in types.items())
        filled = ", ".join(_filled(n, types[n], _KINDS[folder]) for n in names)
        parts.append(
            f"SELECT {filled} FROM read_json(?, format = 'newline_delimited', "
            f"columns = {{{schema}}}, ignore_errors = true, "
            f"maximum_object_size = {MAX_LINE_BYTES}) WHERE time_s IS NOT NULL"
        )
        values.append(literal_paths([one.path for one in lines]))
    if not parts:
        return None
    return Source(sql=f"({' UNION ALL '.join(parts)})", values=tuple(values))


def block_files(run: Path, folder: str) -> list[Listed]:
    """Return the files of a block log; for a block in two forms, the packed one."""
    found = listed(run, folder, suffixes=(".parquet", ".jsonl"))
    packed = {one.name for one in found if one.name.endswith(".parquet")}
    lines = ".jsonl"
    return [
        one
        for one in found
        if one.name in packed or f"{one.name.removesuffix(lines)}.parquet" not in packed
    ]


def _column_types(kind: type[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        known = [one for one in (hint, *getattr(hint, "__args__", ())) if one in _TYPES]
        found[name] = _TYPES[known[0]]
    return found


def _filled(name: str, type_: str, kind: type[Any]) -> str:
    """Return a column of lines, in which fields with their default are left out."""
    default = kind.__dataclass_fields__[name].default
    column = quoted(name)
    if isinstance(default, str):
        return f"coalesce({column}, '{default}') AS {column}"
    if isinstance(default, int | float):
        return f"coalesce({column}, {default}) AS {column}"
    return f"CAST({column} AS {type_}) AS {column}"
