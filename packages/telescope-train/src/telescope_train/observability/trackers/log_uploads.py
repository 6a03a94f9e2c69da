"""`LogUploads`: which logs of a run a tracker gets at its end, packed.

Each log becomes one gzip file: those of its files that were full first, oldest first.
"""

import gzip
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from telescope_core.records.logs import LogFiles, log_files
from telescope_core.secret_names import hidden

_LEVEL = 1
"""Of compression: logs shrink to a tenth, and a run waits for it."""
_DEBUG = re.compile(rb'^\{"time_s":[^,]*,"level":"debug"')


@dataclass(frozen=True, slots=True, kw_only=True)
class LogUploads:
    """What is sent, and what is left out of it."""

    folder: Path
    """Of the logs."""
    has_logs: bool = False
    """The logs of all processes, without debug messages."""
    has_debug: bool = False
    """The same, with debug messages."""
    has_output: bool = False
    """What inference servers and environment workers print."""
    secrets: frozenset[str] = frozenset()
    """Values that stay here."""

    def pack(self, into: Path) -> list[Path]:
        """Write what is sent to the folder `into`; returns its files."""
        suffixes = [".jsonl"] if self.has_logs or self.has_debug else []
        suffixes += [".log"] if self.has_output else []
        found = log_files(path for path in self.folder.glob("*") if path.suffix in suffixes)
        return [self._packed(log, into) for log in found]

    def _packed(self, log: LogFiles, into: Path) -> Path:
        path = into / f"{log.name}.gz"
        with gzip.open(path, "wb", compresslevel=_LEVEL) as packed:
            if log.name.endswith(".log"):
                packed.writelines(self._without_secrets(log.paths))
            elif self.has_debug:
                for one in log.paths:
                    with one.open("rb") as stream:
                        shutil.copyfileobj(stream, packed)
            else:
                packed.writelines(line for line in _lines(log.paths) if not _DEBUG.match(line))
        return path

    def _without_secrets(self, paths: Sequence[Path]) -> Iterator[bytes]:
        for line in _lines(paths):
            text = line.decode("utf-8", "surrogateescape")
            yield hidden(text, self.secrets).encode("utf-8", "surrogateescape")


def _lines(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as stream:
            yield from stream
