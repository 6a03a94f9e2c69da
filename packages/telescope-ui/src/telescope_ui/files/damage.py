"""`Damage`: files of a run that DuckDB cannot read, each with the reason, so that others can be.

A file with a torn end is noticed at once. A file that is broken in its middle, or has a line that
is too long, makes the query fail that reads it: then files are tried one by one, and the query is
repeated without the broken ones.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from threading import Lock

import duckdb

from telescope_core.records.arrow import arrow_modules
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.run_files import Listed, literal_paths

MAX_LINES_BYTES = 512 * 2**20
"""Largest file of JSON lines that is read."""
MAX_LINE_BYTES = 2**20
_MAX_REASON = 400
_ROWS = {
    **{"rollouts": "rollouts", "attempts": "replaced attempts", "events": "stages of rollouts"},
    **{"calls": "model calls", "timeline": "spans", "gauges": "values of meters"},
}
"""Content of the files in each folder."""
_MAX_KNOWN = 100_000


def lines_table(types: Mapping[str, str]) -> str:
    """Return the rows of files of lines in SQL, as columns of these types, by their names.

    The paths are bound to it. A line that is no object is a row without any value.
    """
    columns = ", ".join(f"\"{name}\": '{kind}'" for name, kind in types.items())
    return (
        f"read_json(?, format = 'newline_delimited', columns = {{{columns}}}, "
        f"ignore_errors = true, maximum_object_size = {MAX_LINE_BYTES})"
    )


_PROBES = {
    ".parquet": "SELECT max(hash(COLUMNS(*))) FROM read_parquet(?)",
    ".jsonl": f"SELECT count(time_s) FROM {lines_table({'time_s': 'DOUBLE'})}",
}


class Damage:
    """The files that cannot be read, with reasons; any thread may ask."""

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        """`cursor` returns a new connection for one thread."""
        self._cursor = cursor
        self._lock = Lock()
        self._found: dict[Listed, str] = {}

    def problem(self, file: Listed) -> str:
        """Return why a file cannot be read, as a sentence; empty if no problem is known."""
        with self._lock:
            reason = self._found.get(file, "")
        reason = reason or _shallow(file)
        return left_out(file.folder.name, file.name, reason) if reason else ""

    def find(self, files: Sequence[Listed]) -> bool:
        """Try to read all of `files`; return whether some turned out to be damaged."""
        found: dict[Listed, str] = {}
        for file in files:
            if not self.problem(file):
                reason = self._tried(file)
                if reason:
                    found[file] = reason
        with self._lock:
            if len(self._found) > _MAX_KNOWN:
                self._found.clear()
            self._found |= found
        return bool(found)

    def _tried(self, file: Listed) -> str:
        try:
            with self._cursor() as cursor:
                cursor.execute(_PROBES[file.path.suffix], [literal_paths([file.path])]).fetchall()
        except duckdb.Error as error:
            return with_details(unreadable(file.name), error)
        return ""


def left_out(folder: str, name: str, reason: str) -> str:
    """Return a sentence about a problem: the file, the error, what is not shown, and advice.

    If `reason` has the message of a library, that follows the sentence on a line of its own.
    """
    what, _, details = reason.partition("\n")
    said = (
        f"{folder}/{name} is left out: {what}. The {_ROWS[folder]} in it are not shown, and all "
        "else is; if this folder was copied, copy the file again"
    )
    return f"{said}\n{details}" if details else said


def unreadable(name: str) -> str:
    """Return the problem of a file that could be opened but not read to its end."""
    if name.endswith(".jsonl"):
        return f"a line of it is damaged, or longer than {MAX_LINE_BYTES // 2**20} MiB"
    return "its content is damaged"


def with_details(sentence: str, error: Exception) -> str:
    """Return a sentence, followed by a line with a library's message."""
    return f"{sentence}\n{' '.join(str(error).split())[:_MAX_REASON]}"


def answering(
    damage: Damage, files: Callable[[], Sequence[Listed]], answer: Callable[[], JsonObject]
) -> JsonObject:
    """Return `answer()`; if damaged ones of `files()` make it fail, try again without them."""
    try:
        return answer()
    except duckdb.Error:
        if not damage.find(files()):
            raise
        return answer()


@lru_cache(maxsize=8192)
def _shallow(file: Listed) -> str:
    """Return a problem that a quick look shows; `stamp` identifies the content in the cache."""
    if file.path.suffix == ".jsonl":
        size = file.stamp.size
        if size <= MAX_LINES_BYTES:
            return ""
        return f"it has {size / 2**20:,.0f} MiB, and at most {MAX_LINES_BYTES // 2**20} are read"
    if not file.stamp.size:
        return "it is empty"
    arrow, parquet = arrow_modules()
    try:
        parquet.read_metadata(file.path)
    except (arrow.ArrowException, OSError) as error:
        return with_details(
            "its end is missing or damaged, so that it was not written whole", error
        )
    return ""
