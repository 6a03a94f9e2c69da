"""`LogUploads`: choose and pack the logs of a run for a tracker, during the run and at its end.

Each log becomes one gzip file that holds its parts, oldest first. A log that has not changed since
it was last packed is skipped.
"""

import gzip
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from telescope_core.base.secret_names import hidden
from telescope_core.records.logs import LogFiles, log_files
from telescope_core.records.output_logs import is_output

_LEVEL = 1
"""Compression level: logs shrink to a tenth, quickly enough for a run that waits."""
_DEBUG = re.compile(rb'^\{"time_s":[^,]*,"level":"debug"')
LogSizes = Mapping[str, tuple[tuple[str, int], ...]]
"""Log -> the names and sizes of its files."""
NOTHING: LogSizes = {}


class Packed(NamedTuple):
    """Packed logs."""

    paths: list[Path]
    sizes: LogSizes
    """Sizes of all logs that have been packed so far, for the next call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogUploads:
    """The logs that are sent, and the secrets that are removed."""

    folder: Path
    """Folder of the logs."""
    has_logs: bool = False
    """Whether logs of all processes are sent, without debug messages."""
    has_debug: bool = False
    """Whether debug messages are sent too."""
    has_output: bool = False
    """Whether the output of inference servers and environment workers is sent."""
    secrets: frozenset[str] = frozenset()
    """Values that are removed."""

    def pack(self, into: Path, known: LogSizes = NOTHING) -> Packed:
        """Pack everything that has changed since the sizes `known` into the folder `into`."""
        found = log_files(
            path
            for path in self.folder.glob("*")
            if path.suffix in (".jsonl", ".log")
            and (self.has_output if is_output(path.name) else self.has_logs or self.has_debug)
        )
        paths: list[Path] = []
        sizes = dict(known)
        for log in found:
            # A log that is full just now has its turn the next time.
            with suppress(FileNotFoundError):
                now = tuple((path.name, path.stat().st_size) for path in log.paths)
                if known.get(log.name) != now:
                    paths.append(self._packed(log, into))
                    sizes[log.name] = now
        return Packed(paths, sizes)

    def _packed(self, log: LogFiles, into: Path) -> Path:
        path = into / f"{log.name}.gz"
        with gzip.open(path, "wb", compresslevel=_LEVEL) as packed:
            if is_output(log.name):
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
