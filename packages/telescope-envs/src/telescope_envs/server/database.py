"""The server's SQLite file, opened in WAL mode and migrated according to `PRAGMA user_version`.

One connection reads; another writes, one transaction at a time. Other processes (`telescope hub
token`) may have the same file open, because SQLite locks it for each transaction.
"""

import shutil
import sqlite3
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from telescope_core.base.errors import RegistryError
from telescope_envs.records.files import replace_file, sha256_of

FILE = "hub.sqlite3"
ARTIFACTS = "artifacts"
_MIGRATIONS = ("schema.sql", "suspensions.sql", "publishers.sql", "aliases.sql")
"""Migration scripts, in order; `user_version` counts those that ran on a database."""
_BUSY_LIMIT_S = 10.0
_RESTORE = "stop its server, and restore the data folder from a backup"
_FAILURES = {
    sqlite3.SQLITE_FULL: ("its disk is full", "make room, then try again"),
    sqlite3.SQLITE_IOERR: (
        "its disk cannot be read or written",
        "look whether the disk is full or failing, then try again",
    ),
    sqlite3.SQLITE_READONLY: (
        "it cannot be written",
        "run this as the user who owns it, on a disk that can be written",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        "it, or a file beside it, cannot be opened",
        "give this user the rights to its folder, or make room on its disk",
    ),
    sqlite3.SQLITE_BUSY: (
        f"another process has been writing it for {_BUSY_LIMIT_S:g} s",
        "try again, or end that process",
    ),
    sqlite3.SQLITE_CORRUPT: ("it is damaged", _RESTORE),
    sqlite3.SQLITE_NOTADB: (
        "it is not the database of a registry server",
        f"give another --data; if it was one, {_RESTORE}",
    ),
}
"""Primary code of SQLite -> what is wrong with the file, and what to do; others are defects."""
_NO_FILES_BESIDE = (
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
)
"""Codes where the files that SQLite needs beside a database cannot be made."""


def time_text(moment: datetime) -> str:
    """Return a time as records have it: ISO 8601 in UTC, sorted as text as it is by time."""
    return moment.isoformat(timespec="milliseconds")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def failures_named(path: Path) -> Generator[None]:
    """Raise errors of the disk and of the file `path` as a RegistryError that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        if _code(error) not in _FAILURES:
            raise
        what, advice = _FAILURES[_code(error)]
        raise RegistryError(f"{path}: {what} ({error}); {advice}") from error


class Database:
    """The records in the folder `data`, which is created if it does not exist.

    If it `is_read_only`, the folder must exist, and may be one that cannot be written.
    """

    def __init__(self, data: Path, *, is_read_only: bool = False) -> None:
        self.path = data / FILE
        self._writing = threading.Lock()
        self._writing_thread = 0
        with failures_named(self.path):
            if is_read_only:
                self._reader = self._writer = _connect_to_read(self.path)
                return
            data.mkdir(parents=True, exist_ok=True)
            self._writer = _connect(self.path)
            try:
                _migrate(self._writer, self.path)
                self._reader = _connect(self.path)
            except BaseException:
                self._writer.close()
                raise

    def hold(self) -> None:
        """Let everything that is read from now on be of one moment; nothing can be written then."""
        self._reader.execute("BEGIN")

    def check(self) -> None:
        """Raise RegistryError if the file is damaged; all of it is read."""
        with failures_named(self.path):
            found = [text for (text,) in self.rows("PRAGMA quick_check(3)")]
        if found != ["ok"]:
            said = "; ".join(found).replace("\n", " ")
            raise RegistryError(f"{self.path}: it is damaged ({said}); {_RESTORE}")

    def rows(self, query: str, *values: object) -> list[tuple[str, ...]]:
        """Return the rows of a query; inside a transaction, it sees that transaction's changes."""
        return self._reading.execute(query, values).fetchall()

    def value(self, query: str, *values: object) -> str | None:
        """Return the first column of the first row as text; None when there is no row."""
        found = self._reading.execute(query, values).fetchone()
        return str(found[0]) if found is not None else None

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Yield the writing connection; commits at the end, or rolls back on an error."""
        with self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writing_thread = threading.get_ident()
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # A full disk makes SQLite roll back by itself.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
            finally:
                self._writing_thread = 0

    @property
    def _reading(self) -> sqlite3.Connection:
        """The connection to read from; only the writer sees the changes of its transaction."""
        inside = self._writing_thread == threading.get_ident()
        return self._writer if inside else self._reader

    def close(self) -> None:
        """Close the file; calling it twice is fine."""
        self._reader.close()
        self._writer.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = _opened(str(path))
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        # Without this, REPLACE would delete rows without running the delete triggers.
        connection.execute("PRAGMA recursive_triggers = ON")
        path.chmod(0o600)
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(place: str) -> sqlite3.Connection:
    return sqlite3.connect(
        place,
        timeout=_BUSY_LIMIT_S,
        isolation_level=None,
        check_same_thread=False,
        uri=place.startswith("file:"),
    )


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a connection that writes no records, also where nothing at all can be written."""
    address = path.absolute().as_uri()
    connection = _opened(f"{address}?mode=rw")
    try:
        had = _version(connection, path)
    except sqlite3.Error as error:
        connection.close()
        log = path.with_name(f"{path.name}-wal")
        if _code(error) not in _NO_FILES_BESIDE or (log.exists() and log.stat().st_size):
            raise
        # Nobody has it open and nothing is left to be taken over, so the file alone is enough.
        connection = _opened(f"{address}?immutable=1")
        had = _version(connection, path)
    if had < len(_MIGRATIONS):
        connection.close()
        Database(path.parent).close()
        return _connect_to_read(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """Return how many migrations the database has had; raises RegistryError if too many."""
    (had,) = connection.execute("PRAGMA user_version").fetchone()
    if had > len(_MIGRATIONS):
        raise RegistryError(
            f"{path} was written by a newer telescope-envs (format {had}, this one supports "
            f"{len(_MIGRATIONS)}); upgrade telescope-envs"
        )
    return int(had)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Run the migrations that the database has not had, each one atomically."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
    had = _version(connection, path)
    artifacts = path.with_name(ARTIFACTS)
    if not had and any(artifacts.glob("*/*")):
        raise RegistryError(
            f"{path} is missing or empty, while {artifacts} holds the files of releases: a new "
            f"database would lose all records; {_RESTORE}"
        )
    for number, name in enumerate(_MIGRATIONS[had:], had + 1):
        script = (Path(__file__).parent / name).read_text(encoding="ascii")
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;"
            )
        except sqlite3.OperationalError:
            with suppress(sqlite3.OperationalError):
                connection.execute("ROLLBACK")
            # Another process may have opened the new folder at the same time and migrated first.
            (now,) = connection.execute("PRAGMA user_version").fetchone()
            if now < number:
                raise


class ArtifactFiles:
    """The files below `data/artifacts`; `data/incoming` holds files that are being written."""

    def __init__(self, data: Path) -> None:
        self.root = data / ARTIFACTS
        self.incoming = data / "incoming"

    def make_folders(self) -> None:
        """Make the two folders, if they are missing."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return the path where the bytes with that hash are stored or would be stored."""
        return self.root / sha256[:2] / sha256

    def put(self, data: bytes) -> Path | None:
        """Store `data` durably; returns the new file, or None if it was stored before."""
        target = self.path(sha256_of(data))
        if target.exists():
            return None
        replace_file(target, data, scratch=self.incoming)
        return target

    @contextmanager
    def stored(self, contents: Iterable[bytes]) -> Generator[None]:
        """Store `contents`; on any error here or in the block, remove those that are new."""
        written: list[Path] = []
        try:
            for data in contents:
                path = self.put(data)
                written += [path] if path is not None else []
            yield
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise

    def clear_incoming(self) -> None:
        """Remove partial files of a killed server; the caller must hold the lock."""
        shutil.rmtree(self.incoming)
        self.incoming.mkdir()
