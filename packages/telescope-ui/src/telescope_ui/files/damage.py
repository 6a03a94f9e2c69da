"""`Damage`: files of a run that DuckDB cannot read, each with the reason, so that others can be.

A file whose end is torn is seen at once. One that is broken in its middle, or has a line that is
too long, fails the question that reads it: then files are tried one by one, and it is asked again.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock

import duckdb

from telescope_core.records.arrow import arrow_modules
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.run_files import Listed, literal_paths

MAX_LINES_BYTES = 512 * 2**20
"""Size of a file of JSON lines that is read."""
MAX_LINE_BYTES = 2**20
_MAX_REASON = 200
_MAX_KNOWN = 100_000
_PROBES = {
    ".parquet": "SELECT max(hash(COLUMNS(*))) FROM read_parquet(?)",
    ".jsonl": "SELECT count(time_s) FROM read_json(?, format = 'newline_delimited', columns = "
    "{time_s: 'DOUBLE'}, ignore_errors = true, "
    f"maximum_object_size = {MAX_LINE_BYTES})",
}


class Damage:
    """What is known of files that cannot be read; any thread may ask."""

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        """`cursor` returns a connection of its own for one thread."""
        self._cursor = cursor
        self._lock = Lock()
        self._found: dict[Listed, str] = {}

    def problem(self, file: Listed) -> str:
        """Return why a file cannot be read, as a sentence; empty if nothing is known against it."""
        with self._lock:
            reason = self._found.get(file, "")
        reason = reason or _shallow(file)
        return f"{file.path.parent.name}/{file.name} is left out: {reason}" if reason else ""

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
            return " ".join(str(error).split())[:_MAX_REASON]
        return ""


def answering(
    damage: Damage, files: Callable[[], Sequence[Listed]], answer: Callable[[], JsonObject]
) -> JsonObject:
    """Return `answer()`, and again without the damaged ones of `files()` if some fail it."""
    try:
        return answer()
    except duckdb.Error:
        if not damage.find(files()):
            raise
        return answer()


@lru_cache(maxsize=8192)
def _shallow(file: Listed) -> str:
    """Return what can be seen against a file soon; its stamp makes another content another one."""
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
        return f"it is no whole Parquet file: {' '.join(str(error).split())[:_MAX_REASON]}"
    return ""
