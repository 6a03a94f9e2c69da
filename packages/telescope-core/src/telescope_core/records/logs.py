"""Logs of the processes of a run: one JSON object a line, in `logs/` of the run folder.

Each process has its own file, `COMPONENT[-SOURCE].jsonl`, and calls `Logs.begin` once. A full file
is renamed to `....1.jsonl`, the one before it to `....2.jsonl`, and so on.
"""

import json
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from telescope_core.base.messages import json_object
from telescope_core.base.secret_names import hidden, secret_values
from telescope_core.records.files import ends_with_line

MAX_BYTES = 64 * 2**20
"""Size at which a file is renamed and a new one is started."""
NUM_OLD = 3
"""Number of full files that are kept for each process."""
MAX_LINE_BYTES = 16 * 2**10
"""Largest line, with its end; a longer message loses its middle."""
SHOWN_AS = "shown_as"
"""Attribute of a record that a person was shown: the level that its line has. Such a record has the
level INFO, so that nothing shows it on the terminal a second time."""
_OWN = ("telescope_core", "telescope_adapters", "telescope_envs", "telescope_train")
_LOUD = (
    *("aiohttp", "asyncio", "botocore", "datasets", "filelock", "fsspec", "httpcore", "httpx"),
    *("huggingface_hub", "matplotlib", "mcp", "numba", "openai", "opentelemetry", "ray"),
    *("torch", "transformers", "urllib3", "uvicorn", "vllm", "wandb"),
)
"""Libraries whose INFO messages are of no use: only their warnings are logged."""
_LEVELS = ((logging.ERROR, "error"), (logging.WARNING, "warning"), (logging.INFO, "info"))
LEVEL_WORDS = {
    **{"trace": "debug", "debug": "debug", "info": "info", "notice": "info"},
    **{"warn": "warning", "warning": "warning", "error": "error"},
    **{"critical": "error", "fatal": "error", "exception": "error"},
}
"""Name of a level in other programs, in small letters -> level of a line."""
_LEVEL = re.compile(r"\b(TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
WRITTEN_TIME = re.compile(
    r"(?:(\d{4})[-/])?(\d\d)[-/](\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?"
)
"""A time as programs write it: year, month, day, hour, minute, second, fraction, zone."""
HEAD = 120
"""Characters at the beginning of another program's line that are searched for time and level."""
_NUMBER = re.compile(r"\.(\d+)$")
_TAIL_BYTES = 4 * MAX_LINE_BYTES
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The folder and the level of the logs of a run."""

    folder: Path
    is_debug: bool = False
    """Whether debug messages of Telescope's own code are written too."""

    def begin(
        self,
        component: str,
        source: str = "",
        *,
        shows_warnings: bool = True,
        secrets: Iterable[str] = (),
    ) -> "ProcessLog":
        """Write this process's log lines from now on, until `close` or its end.

        `component` is the kind of this process, and `source` identifies it. `shows_warnings`:
        warnings go to stderr too, as by default in Python. `secrets`: values that are removed from
        every line, as are those of environment variables named like secrets.

        If the folder is missing, as on a machine that does not share it, nothing is written.
        """
        if not self.folder.is_dir():
            return ProcessLog(None, is_debug=self.is_debug, shows_warnings=shows_warnings)
        hide = {*secrets, *secret_values(os.environ)}
        path = self.folder / log_name(component, source)
        handler = JsonLines(path, component=component, source=source, hide=hide)
        log = ProcessLog(handler, is_debug=self.is_debug, shows_warnings=shows_warnings)
        _LOGGER.info("process %d on %s begins", os.getpid(), socket.gethostname())
        return log


class ProcessLog:
    """The log of this process; as a context manager, it lasts until the context ends."""

    def __init__(
        self, handler: "JsonLines | None", *, is_debug: bool, shows_warnings: bool
    ) -> None:
        self._handler = handler
        self._root = logging.getLogger()
        self._levels = [(self._root, self._root.level)]
        self._handlers: list[logging.Handler] = []
        if handler is None:
            return
        if shows_warnings and not self._root.handlers and logging.lastResort is not None:
            # Python shows warnings only as long as the root has no handler.
            self._handlers.append(logging.lastResort)
        self._handlers.append(handler)
        for one in self._handlers:
            self._root.addHandler(one)
        self._set_levels(is_debug=is_debug)
        logging.captureWarnings(True)

    def _set_levels(self, *, is_debug: bool) -> None:
        asked = [(name, logging.WARNING) for name in _LOUD]
        asked += [(name, logging.DEBUG) for name in _OWN if is_debug]
        loggers = [(logging.getLogger(name), level) for name, level in asked]
        # Levels that were set on purpose stay.
        plain = [(one, level) for one, level in loggers if one.level == logging.NOTSET]
        self._levels += [(one, one.level) for one, _ in plain]
        self._root.setLevel(min(logging.INFO, self._root.level))
        for one, level in plain:
            one.setLevel(level)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next_life(self) -> None:
        """Count another start of the program that this process supervises."""
        if self._handler is not None:
            self._handler.life += 1

    def close(self) -> None:
        """Stop writing the log."""
        if self._handler is None:
            return
        logging.captureWarnings(False)
        for one in self._handlers:
            self._root.removeHandler(one)
        for one, level in self._levels:
            one.setLevel(level)
        # Nothing that goes wrong with a log is raised, as a full disk when its file is closed.
        with suppress(OSError):
            self._handler.close()
        self._handler = None


class JsonLines(RotatingFileHandler):
    """Appends and flushes a line for each record; errors are not raised."""

    def __init__(
        self,
        path: Path,
        *,
        component: str,
        source: str = "",
        hide: Iterable[str] = (),
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(
            path, maxBytes=max_bytes, backupCount=NUM_OLD, encoding="utf-8", delay=True
        )
        self.namer = _numbered_name
        self.life = last_life(path) + 1
        """Number of the start of the processes that wrote to this log; 1 = the first."""
        self._component, self._source = component, source
        self._hide = set(hide)
        self._has_failed = False

    def hide(self, values: Iterable[str]) -> None:
        """Remove these texts from lines from now on."""
        self._hide = {*self._hide, *values}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields = {
            "time_s": round(record.created, 6),
            "level": getattr(record, SHOWN_AS, None) or level_name(record.levelno),
            "component": self._component,
            "source": self._source,
            "life": self.life,
        }
        return line_of(fields, hidden(_message(record), self._hide))

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once, on stderr, that a line could not be written."""
        if not self._has_failed:
            self._has_failed = True
            with suppress(OSError, ValueError):
                sys.stderr.write(
                    f"a log message was not written to {self.baseFilename}: {sys.exc_info()[1]}. "
                    "The process goes on; further ones that are not written are not reported\n"
                )

    def _open(self) -> Any:
        stream: IO[str] = super()._open()
        with open(self.baseFilename, "rb") as written:
            if not ends_with_line(written):
                stream.write("\n")
        return stream


@contextmanager
def telling_failure(logger: logging.Logger, what: str) -> Generator[None]:
    """Log the error that ends the context, with its traceback; it is raised further.

    `what`: the activity in the context. Nothing is written to stderr; the handler of the error
    shows it.
    """
    try:
        yield
    except Exception as error:
        logger.info("%s failed", what, exc_info=error, extra={SHOWN_AS: "error"})
        raise
    except BaseException as error:
        by = type(error).__name__
        logger.info("%s was interrupted (%s)", what, by, extra={SHOWN_AS: "warning"})
        raise


def hide_in_logs(values: Iterable[str]) -> None:
    """Remove these secrets from the log of this process from now on."""
    for one in logging.getLogger().handlers:
        if isinstance(one, JsonLines):
            one.hide(values)


class LogFiles(NamedTuple):
    """The files of one log."""

    name: str
    """Name of its newest file."""
    paths: tuple[Path, ...]
    """Oldest first."""


def log_files(paths: Iterable[Path]) -> list[LogFiles]:
    """Return the logs to which `paths` belong, sorted by name."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in paths:
        name, number = base_name(path.name)
        found.setdefault(name, []).append((-number, path))
    return [
        LogFiles(name, tuple(path for _, path in sorted(parts)))
        for name, parts in sorted(found.items())
    ]


def base_name(name: str) -> tuple[str, int]:
    """Return the name of a log file without its number, and that number."""
    stem, suffix = os.path.splitext(name)
    match = _NUMBER.search(stem) if suffix == ".jsonl" else None
    return (name, 0) if match is None else (f"{stem[: match.start()]}{suffix}", int(match[1]))


def log_name(component: str, source: str = "") -> str:
    """Return the name of a log, without dots, which would look like the number of a full file."""
    text = re.sub(r"^https?://", "", source)
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")
    return f"{component}-{plain}.jsonl" if plain else f"{component}.jsonl"


def level_name(level: int) -> str:
    """Return the word for a level of Python's `logging`."""
    return next((name for least, name in _LEVELS if level >= least), "debug")


def level_of(text: str, before: str) -> str:
    """Return the level of a line of another program; `before`: the level of the line before it.

    A line that has neither a level nor a time goes on with the line before it.
    """
    head = text[:HEAD]
    if (named := _LEVEL.search(head)) is not None:
        return LEVEL_WORDS[named[1].lower()]
    return before if WRITTEN_TIME.search(head) is None else "info"


def line_of(fields: Mapping[str, Any], message: str) -> str:
    """Return a line without its end; a message that is too long loses its middle."""
    line = _line(fields, message)
    room = keep = len(message)
    while len(line) >= MAX_LINE_BYTES:
        # The message takes up to 12 bytes a character, and which ones are kept changes that.
        keep = min(int(keep * 0.9), int(keep * MAX_LINE_BYTES / len(line)))
        first = keep // 4
        # The end of a traceback says what happened.
        cut = f"{message[:first]}\n... {room - keep} characters are left out ...\n"
        line = _line(fields, cut + message[room - (keep - first) :])
    return line


def last_life(path: Path) -> int:
    """Return the number of the last start in a log; 0 = the log is empty."""
    for one in (path, path.with_name(f"{path.stem}.1{path.suffix}")):
        with suppress(OSError), one.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            for line in reversed(stream.read().splitlines()):
                life = (json_object(line) or {}).get("life")
                if isinstance(life, int):
                    return life
    return 0


def _line(fields: Mapping[str, Any], message: str) -> str:
    return json.dumps({**fields, "message": message}, separators=(",", ":"))


def _message(record: logging.LogRecord) -> str:
    parts = [record.getMessage()]
    if record.exc_info and record.exc_info[0] is not None:
        parts.append("".join(traceback.format_exception(*record.exc_info)).rstrip())
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _numbered_name(name: str) -> str:
    """Return `driver.1.jsonl` for the name `driver.jsonl.1` that Python would choose."""
    stem, _, number = name.rpartition(".jsonl.")
    return f"{stem}.{number}.jsonl"
