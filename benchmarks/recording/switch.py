"""Parts of a run's recording that can be turned off and on between two steps."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from telescope_core.records import RolloutRow, RunFolder
from telescope_core.records.events import AttemptEvent
from telescope_core.records.timeline import TimelineSpan
from telescope_train.observability.calls import UNWATCHED, Caller, CallLog, Watching
from telescope_train.observability.recording import Recording
from telescope_train.observability.spans import SpanRecorder
from telescope_train.observability.timeline import Timeline


class Switch:
    """Whether anything is recorded."""

    is_on = False


SWITCH = Switch()
"""One for the process, as the rank makes its recorder by itself."""


class SwitchedSpans(SpanRecorder):
    """Takes the place of a rank's recorder."""

    def begin(self, step: int | None) -> None:
        """Begin a step."""
        if SWITCH.is_on:
            super().begin(step)

    @contextmanager
    def span(
        self, name: str, *, microbatch: int | None = None, on_cpu: bool = False
    ) -> Generator[None]:
        """Measure the block, or only run it."""
        if not SWITCH.is_on:
            yield
            return
        with super().span(name, microbatch=microbatch, on_cpu=on_cpu):
            yield


class SwitchedEvents:
    """Takes the place of the log of events."""

    def __init__(self, recording: Recording) -> None:
        self._events = recording.events

    def add(self, event: AttemptEvent) -> None:
        """Record an event."""
        if SWITCH.is_on:
            self._events.add(event)

    def pack(self, step: int) -> None:
        """Pack the events of a step."""
        if SWITCH.is_on:
            self._events.pack(step)


class SwitchedCalls(CallLog):
    """Takes the place of the log of model calls."""

    def __init__(self, calls: CallLog) -> None:
        super().__init__(lambda call: None)
        self._calls = calls

    def watching(self, caller: Caller, on_sent: Any = UNWATCHED.on_sent) -> Watching:
        """Return what records a call, or nothing."""
        return self._calls.watching(caller, on_sent) if SWITCH.is_on else UNWATCHED


def switched_timeline(timeline: Timeline) -> Timeline:
    """Return a timeline that passes its spans on."""

    def add(span: TimelineSpan) -> None:
        if SWITCH.is_on:
            timeline.add(span)

    return Timeline(add)


class SwitchedFolder:
    """Takes the place of the run folder: rows of metrics are written in any case."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def log_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics."""
        self._folder.log_metrics(row)

    def write_rollouts(self, step: int, rows: Iterable[RolloutRow]) -> Any:
        """Write the rollouts of a step."""
        if SWITCH.is_on:
            self._folder.write_rollouts(step, rows)

    def write_attempts(self, step: int, rows: Iterable[RolloutRow]) -> Any:
        """Write other attempts of a step."""
        if SWITCH.is_on:
            self._folder.write_attempts(step, rows)

    def write_token_facts(self, step: int, rows: Iterable[Any]) -> Any:
        """Write what the trainer found of the tokens of a step."""
        if SWITCH.is_on:
            self._folder.write_token_facts(step, rows)
