"""Events of each attempt at a rollout: the rows of `events/` in a run folder.

Rows of a step are lines of JSON, appended during the step. When the step is complete, they become
one Parquet file, and the files of many steps are later merged (`step_files`).
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from telescope_core.base import clock
from telescope_core.base.types import WeightVersion
from telescope_core.records.files import write_text
from telescope_core.records.row_log import RowFiles, RowLog
from telescope_core.records.step_files import merge, part_of, parts_in, separate, step_path

_WRITER_OPTIONS = {"compression": {"time_s": "zstd", "group_id": "zstd", "reason": "zstd"}}
"""Columns worth compressing; dictionaries leave only a few bits of the others."""


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


_FILES = RowFiles(AttemptEvent, int_bits=32, options=_WRITER_OPTIONS)


class EventSink(Protocol):
    """Receives events: `EventLog`, or a list in a test."""

    def add(self, event: AttemptEvent, /) -> None:
        """Record `event`; must be quick, and must not fail."""
        ...

    def pack(self, step: int) -> None:
        """Note that no more events of `step` will follow. May take as long as writing a file."""
        ...


class EventLog(RowLog[AttemptEvent]):
    """Writes the events of a run, those of a step into one file.

    Events are added from one event loop. Events for which the disk has no room are kept until
    `flush` or `pack` can write them; both raise until then.
    """

    def __init__(
        self, folder: Path, *, hear: Callable[[AttemptEvent], None] = lambda event: None
    ) -> None:
        """`hear` is called with each event, whose time is on the clock of the event loop."""
        self._hear = hear
        self._epoch_s: float | None = None
        """Time at which the clock of the event loop was 0, in seconds since 1970."""
        super().__init__(folder, _FILES)

    def add(self, row: AttemptEvent) -> None:
        """Record an event; it is on disk within a second."""
        self._hear(row)
        if self._epoch_s is None:
            # Once: durations are right even if somebody sets the clock of the machine.
            self._epoch_s = clock.now_s() - asyncio.get_running_loop().time()
        super().add(row)

    def append_some(self, rows: list[AttemptEvent]) -> None:
        """Append those of the first one's step."""
        step = rows[0].step
        of_step = [one for one in rows if one.step == step]
        self._append_lines(_open_file(self._folder, step), of_step, since_s=self._epoch_s or 0.0)
        rows[:] = [one for one in rows if one.step != step]

    def pack(self, step: int) -> None:
        """Write the events of `step`, which is complete, as one Parquet file.

        Raises NoRoomError if the disk is full; the lines are then still there.
        """
        self.flush()
        if _FILES.pack(_open_file(self._folder, step), step_path(self._folder, step)):
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
            write_text(lines, _FILES.lines(kept).content.decode())
            step_path(folder, step).unlink(missing_ok=True)
            if not kept:
                lines.unlink()


def _steps(folder: Path) -> list[int]:
    stems = (path.stem for path in folder.glob("step-*.jsonl"))
    return sorted({*parts_in(folder), *(int(stem.removeprefix("step-")) for stem in stems)})


def _of_step(folder: Path, step: int) -> Iterator[AttemptEvent]:
    # Both are there if the run was killed between the two steps of packing.
    if (part := part_of(folder, step)) is not None:
        return _FILES.read(part.path, part.groups)
    return _FILES.read(_open_file(folder, step))


def _open_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl"
