"""Events of each attempt at a rollout: the rows of `events/` in a run folder.

Rows of a step are lines of JSON, appended during the step, so that a kill loses none. When the step
is complete, they become one Parquet file, which is about 20 times smaller, and the files of many
steps are later merged (`step_files`).
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import msgspec

from telescope_core.base.errors import ConfigError, NoRoomError
from telescope_core.base.types import WeightVersion
from telescope_core.records.arrow import arrow_modules
from telescope_core.records.files import append_content, read_json_lines, write_text
from telescope_core.records.folders import whole_file
from telescope_core.records.step_files import merge, part_of, parts_in, separate, step_path

_FLUSH_S = 1.0
_WRITER_OPTIONS = {"compression": {"time_s": "zstd", "group_id": "zstd", "reason": "zstd"}}
"""Columns worth compressing; dictionaries leave only a few bits of the others."""
_MOST_KEPT = 1024
"""Number of events that are written at once, before `_FLUSH_S` have passed."""


class Stage(StrEnum):
    """The stage of an attempt."""

    DRAWN = "drawn"
    """Its example has been chosen."""
    WAITING = "waiting"
    """It waits for a slot, to begin or for its next model call."""
    GENERATING = "generating"
    """A server generates for it."""
    ENVIRONMENT = "environment"
    """The environment works: it sets up, runs tools, or makes the next prompt."""
    SCORING = "scoring"
    """Rewards and metrics are computed."""
    DONE = "done"
    """It ended with a score."""
    CANCELLED = "cancelled"
    """It was stopped, for the given reason."""
    FAILED = "failed"
    """It ended without a score, for the given reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEvent:
    """The start of a stage of an attempt."""

    time_s: float
    """On the clock of the event loop; in a run folder, seconds since 1970, UTC."""
    step: int
    """The step for whose batch it was drawn."""
    environment: str
    group_id: str
    index: int
    """Position of the rollout in its group."""
    attempt: int
    """1 = the first attempt at the rollout."""
    stage: Stage
    call: int = 0
    """For `generating`: number of the model call, 1 first."""
    server: str = ""
    """For `generating`: address of the server."""
    version: WeightVersion | None = None
    """For `generating`: the newest live version of the weights."""
    reason: str = ""
    """For `cancelled` and `failed`: the reason."""


_NAMES = tuple(field.name for field in fields(AttemptEvent))


class _Line(msgspec.Struct, omit_defaults=True):
    """The line of an event: seconds since 1970, without the fields that most events lack."""

    time_s: float
    step: int
    environment: str
    group_id: str
    index: int
    attempt: int
    stage: str
    call: int
    server: str = ""
    version: int | None = None
    reason: str = ""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_Line)


class EventSink(Protocol):
    """Receives events: `EventLog`, or a list in a test."""

    def add(self, event: AttemptEvent) -> None:
        """Record `event`; must be quick, and must not fail."""
        ...

    def pack(self, step: int) -> None:
        """Note that no more events of `step` will follow. May take as long as writing a file."""
        ...


class EventLog:
    """Writes the events of a run to a folder, in threads: a slow disk holds up no rollout.

    Events are added from one event loop. Events for which the disk has no room are kept until
    `flush` or `pack` can write them; both raise until then.
    """

    def __init__(
        self, folder: Path, *, hear: Callable[[AttemptEvent], None] = lambda event: None
    ) -> None:
        """`hear` is called with each event, whose time is on the clock of the event loop."""
        self._folder = folder
        self._hear = hear
        self._events: defaultdict[int, list[AttemptEvent]] = defaultdict(list)
        self._num_kept = 0
        self._keeping = Lock()
        """Held to access the events in memory."""
        self._writing = Lock()
        """Held while files are written."""
        self._timer: asyncio.TimerHandle | None = None
        self._epoch_s: float | None = None
        """Time at which the clock of the event loop was 0, in seconds since 1970."""

    def add(self, event: AttemptEvent) -> None:
        """Record `event`; it is on disk about a second later."""
        self._hear(event)
        loop = asyncio.get_running_loop()
        if self._epoch_s is None:
            # Once: durations are right even if somebody sets the clock of the machine.
            self._epoch_s = time.time() - loop.time()
        # What takes time is left to the thread that writes.
        with self._keeping:
            self._events[event.step].append(event)
            self._num_kept += 1
        if self._num_kept == _MOST_KEPT:
            self._begin_to_write()
        elif self._timer is None:
            self._timer = loop.call_later(_FLUSH_S, self._begin_to_write)

    def _begin_to_write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

        def write() -> None:
            # Whoever packs the step is told.
            with suppress(OSError, NoRoomError):
                self.flush()

        asyncio.get_running_loop().run_in_executor(None, write)

    def flush(self) -> None:
        """Write the events in memory; raises NoRoomError if the disk is full."""
        with self._writing:
            with self._keeping:
                kept, self._events, self._num_kept = self._events, defaultdict(list), 0
            try:
                while kept:
                    step = next(iter(kept))
                    lines = _lines(kept[step], self._epoch_s or 0.0)
                    append_content(_open_file(self._folder, step), lines)
                    del kept[step]
            finally:
                with self._keeping:
                    for step, events in kept.items():
                        self._events[step][:0] = events
                        self._num_kept += len(events)

    def pack(self, step: int) -> None:
        """Write the events of `step`, which is complete, as one Parquet file.

        Raises NoRoomError if the disk is full; the lines are then still there.
        """
        self.flush()
        lines = _open_file(self._folder, step)
        events = _read_lines(lines)
        if not events:
            return
        arrow, parquet = arrow_modules()
        columns = {name: [getattr(event, name) for event in events] for name in _NAMES}
        table = arrow.Table.from_pydict(columns, schema=_schema())
        with whole_file(step_path(self._folder, step)) as temporary:
            parquet.write_table(table, temporary, **_WRITER_OPTIONS)
        lines.unlink()
        merge(self._folder, up_to=step - 1, options=_WRITER_OPTIONS)


def read_events(folder: Path, *, step: int | None = None) -> list[AttemptEvent]:
    """Return the events in `folder` by step and time, by default of all steps.

    Raises ConfigError that names a file which cannot be read.
    """
    return [
        event
        for one in _steps(folder)
        if step in (None, one)
        for event in sorted(_of_step(folder, one), key=lambda event: event.time_s)
    ]


def drop_events(folder: Path, *, after: int, is_repeated: Callable[[AttemptEvent], bool]) -> None:
    """Remove the events after step `after`, of attempts that a resumed run plays again."""
    separate(folder, after=after, options=_WRITER_OPTIONS)
    for step in _steps(folder):
        if step > after:
            kept = [event for event in _of_step(folder, step) if not is_repeated(event)]
            lines = _open_file(folder, step)
            write_text(lines, _lines(kept).decode())
            step_path(folder, step).unlink(missing_ok=True)
            if not kept:
                lines.unlink()


def _steps(folder: Path) -> list[int]:
    stems = (path.stem for path in folder.glob("step-*.jsonl"))
    return sorted({*parts_in(folder), *(int(stem.removeprefix("step-")) for stem in stems)})


def _of_step(folder: Path, step: int) -> Iterator[AttemptEvent]:
    if (part := part_of(folder, step)) is not None:
        arrow, parquet = arrow_modules()
        try:
            with parquet.ParquetFile(part.path) as file:
                groups = range(file.num_row_groups) if part.groups is None else part.groups
                rows = file.read_row_groups(list(groups)).to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(f"{part.path} is not a readable file of events: {error}") from None
        yield from (_event(row) for row in rows)
    # Both are there if the run was killed between the two steps of packing.
    elif (lines := _open_file(folder, step)).is_file():
        yield from map(_event_of, _read_lines(lines))


def _lines(events: Iterable[AttemptEvent], epoch_s: float = 0.0) -> bytes:
    """Return the lines of `events`, whose times are seconds since `epoch_s`."""
    found = [
        _Line(
            epoch_s + one.time_s,
            *(one.step, one.environment, one.group_id, one.index, one.attempt),
            *(one.stage.value, one.call, one.server, one.version, one.reason),
        )
        for one in events
    ]
    try:
        return _ENCODER.encode_lines(found)
    except UnicodeEncodeError:  # half a surrogate pair, in the reason of a failure
        texts = (json.dumps(msgspec.to_builtins(one)) for one in found)
        return "".join(f"{text}\n" for text in texts).encode()


def _read_lines(path: Path) -> list[_Line]:
    """Return the events in a file of lines, without a line that a kill cut short."""
    try:
        return _DECODER.decode_lines(path.read_bytes())
    except FileNotFoundError:
        return []
    except msgspec.MsgspecError:
        return [msgspec.convert(fields, _Line) for fields in read_json_lines(path)]


def _event_of(line: _Line) -> AttemptEvent:
    return _event({name: getattr(line, name) for name in _NAMES})


def _event(row: dict[str, Any]) -> AttemptEvent:
    known: dict[str, Any] = {name: row[name] for name in _NAMES if name in row}
    known["stage"] = Stage(known["stage"])
    return AttemptEvent(**known)


def _open_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl"


def _schema() -> Any:
    arrow, _ = arrow_modules()
    kinds = {
        **{"time_s": arrow.float64(), "step": arrow.int32(), "index": arrow.int32()},
        **{"attempt": arrow.int32(), "call": arrow.int32(), "version": arrow.int32()},
    }
    text = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema([(name, kinds.get(name, text)) for name in _NAMES])
