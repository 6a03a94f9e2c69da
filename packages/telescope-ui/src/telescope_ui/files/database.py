"""One DuckDB for all runs: an index file for each run, in the cache folder of the user.

A file belongs to one process at a time. A second `telescope ui` creates other files.
"""

import hashlib
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Lock
from typing import Any

import duckdb

from telescope_core.base.errors import ConfigError
from telescope_ui.files.damage import Damage

VERSION = 1
"""Version of the tables; files of another version are not opened."""
_MEMORY = "384MB"
_KEPT_DAYS = 90
"""Days after which an unused index is removed."""
_MAX_COPIES = 16
"""Most processes that show the same run at once."""


class Database:
    """Runs queries, and opens the index files of runs; any thread may ask."""

    def __init__(self, cache: Path) -> None:
        """Keep index files in `cache`, which is made if needed; old ones are removed.

        Raises ConfigError if nothing can be written there.
        """
        _make(cache)
        self.cache = cache
        self._lock = Lock()
        self.damage = Damage(self.cursor)
        """Files of all runs that cannot be read."""
        self._connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": _MEMORY,
                "threads": str(min(4, os.cpu_count() or 1)),
                "temp_directory": str(cache / f"temporary-{os.getpid()}"),
                "preserve_insertion_order": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            },
        )

    def close(self) -> None:
        """Close all index files."""
        self._connection.close()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection for one thread."""
        with self._lock:
            return self._connection.cursor()

    def rows(self, sql: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[Any]:
        """Return the result rows of a query, as tuples."""
        with self.cursor() as cursor:
            return cursor.execute(sql, values).fetchall()

    def attach(self, run: Path) -> str:
        """Open the index file of the run in `run`, and return the name of its schema.

        A damaged file is removed first.
        """
        digest = hashlib.sha256(os.fsencode(run)).hexdigest()[:20]
        for copy in range(_MAX_COPIES):
            path = self.cache / f"v{VERSION}-{digest}-{copy}.duckdb"
            name = f"run_{digest}"
            try:
                self._attach(path, name)
            except duckdb.IOException as error:
                if "lock" in str(error).lower():
                    continue
                self._remove(path)
                self._attach(path, name)
            except (duckdb.SerializationException, duckdb.InternalException):
                self._remove(path)
                self._attach(path, name)
            return name
        raise ConfigError(
            f"{_MAX_COPIES} other processes have the index of {run.name} open; end one of them"
        )

    def detach(self, name: str) -> None:
        """Close an index file."""
        with self.cursor() as cursor:
            cursor.execute(f"DETACH DATABASE IF EXISTS {name}")

    def _attach(self, path: Path, name: str) -> None:
        quoted = str(path).replace("'", "''")
        with self.cursor() as cursor:
            cursor.execute(f"ATTACH '{quoted}' AS {name}")
        # So that it counts as used, though nothing may be new in it.
        os.utime(path)

    def _remove(self, path: Path) -> None:
        for one in (path, path.with_name(f"{path.name}.wal")):
            one.unlink(missing_ok=True)


def _make(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        oldest_s = time.time() - _KEPT_DAYS * 86_400
        for path in cache.glob("v*.duckdb"):
            if path.stat().st_mtime < oldest_s:
                path.unlink()
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write the index to {cache}: {error}; set XDG_CACHE_HOME to another folder"
        ) from None


@contextmanager
def opened() -> Generator[Database]:
    """Open the index in `$XDG_CACHE_HOME/telescope/ui`, by default in ~/.cache.

    Without the variable and a home that can be written to, as in many containers, the index is in a
    temporary folder. Raises ConfigError if nothing can be written where the variable says.
    """
    with ExitStack() as held:
        named = os.environ.get("XDG_CACHE_HOME", "")
        if named.startswith("/"):
            database = Database(Path(named, "telescope", "ui"))
        else:
            try:
                database = Database(Path.home() / ".cache" / "telescope" / "ui")
            except (ConfigError, RuntimeError):  # RuntimeError: the user has no home
                place = held.enter_context(TemporaryDirectory(prefix="telescope-ui-"))
                database = Database(Path(place))
        held.callback(database.close)
        yield database


def quoted(column: str) -> str:
    """Return `column` as a quoted name in SQL, whatever characters it has."""
    return '"' + column.replace('"', '""') + '"'
