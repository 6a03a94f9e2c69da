"""The logs of calls and spans, open while a run records, and the paths of traces.

driver, ranks --> Timeline --> timeline/        servers --OTLP--> receiver --> calls/, timeline/
model calls   --> CallLog  --> calls/           all of them  --> collector of the user's, if any
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from telescope_core.evals.result import EvalResult
from telescope_core.records.blocks import BlockLog
from telescope_core.records.eval_points import EvalPoint
from telescope_core.records.events import AttemptEvent, EventLog
from telescope_core.records.timeline import (
    CALLS_FOLDER,
    GAUGES_FOLDER,
    TIMELINE_FOLDER,
    GaugeSample,
    ModelCall,
    TimelineSpan,
)
from telescope_train.observability.calls import CallLog
from telescope_train.observability.eval_numbers import eval_numbers
from telescope_train.observability.otlp_export import TraceExport
from telescope_train.observability.otlp_receiver import OtlpReceiver
from telescope_train.observability.prometheus import PrometheusEndpoint
from telescope_train.observability.timeline import Timeline
from telescope_train.observability.traces import Traces
from telescope_train.observability.trackers.log_uploads import LogUploads
from telescope_train.observability.trackers.tracker import TrackedRun, Tracker
from telescope_train.observability.trackers.tracking import Tracking

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """The optional records of a run."""

    folder: Path
    """Folder of the run."""
    run: str
    """Name of the run."""
    model: str
    """Name of the model, for spans."""
    parts_of_eval: Callable[[str], tuple[str, str]] = lambda folder: (folder, "")
    """Returns the environment and the tag of the folder of an eval, for spans."""
    receives_traces: bool = False
    """Whether servers send their traces to the driver."""
    receiver_secret: str = field(default="", repr=False)
    """Secret for senders of traces; empty = none."""
    receiver_host: str = "127.0.0.1"
    receiver_port: int = 0
    """0 = a free one."""
    export_to: str | None = None
    """Address of a collector for the spans of the run."""
    trackers: Mapping[str, Tracker] = field(default_factory=dict[str, Tracker])
    """Trackers by name."""
    uploads: Mapping[str, LogUploads] = field(default_factory=dict[str, LogUploads])
    """The logs for trackers, by tracker name."""
    tracked: TrackedRun | None = None
    """Description of the run for trackers; needed if there are any."""
    prometheus: PrometheusEndpoint | None = None
    """Shows the newest metrics and meters; opened and closed with the recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Callbacks for the measurements of all parts of a run."""

    events: EventLog
    calls: CallLog
    timeline: Timeline
    meter: Callable[[GaugeSample], None]
    """Records a reading of a meter."""
    row: Callable[[Mapping[str, Any]], None]
    """Processes the metrics of each step."""
    evaluated: Callable[[EvalPoint, EvalResult], None]
    """Processes each eval that has a result."""
    shown: PrometheusEndpoint | None
    """The values for Prometheus."""
    traces_endpoint: str | None
    """Address for the traces of servers; None = there is none."""


@asynccontextmanager
async def recording(
    settings: RecordingSettings, events_folder: Path, *, warn: Callable[[str], None]
) -> AsyncIterator[Recording]:
    """Record until the context ends. `warn` gets texts for people about failures elsewhere."""
    calls = BlockLog(settings.folder / CALLS_FOLDER, ModelCall)
    spans = BlockLog(settings.folder / TIMELINE_FOLDER, TimelineSpan)
    gauges = BlockLog(settings.folder / GAUGES_FOLDER, GaugeSample)
    traces = Traces.new()
    async with AsyncExitStack() as stack:
        for log in (spans, calls, gauges):
            stack.callback(log.close)
        meter, row, tracking = gauges.add, _nowhere, None
        if (shown := settings.prometheus) is not None:
            stack.enter_context(shown)
            row = shown.row
        if settings.tracked is not None and settings.trackers:
            tracking = Tracking(
                settings.trackers, settings.tracked, warn=warn, uploads=settings.uploads
            )
            stack.push(partial(_close, tracking))
            meter, row = _both(meter, tracking.meter), _both(row, tracking.row)
        add_call: Callable[[ModelCall], None] = calls.add
        hear: Callable[[AttemptEvent], None] = _nowhere
        forward: Callable[[bytes], None] = _nowhere
        if settings.export_to is not None:
            export = TraceExport(
                settings.export_to,
                traces,
                run=settings.run,
                model=settings.model,
                parts_of_eval=settings.parts_of_eval,
                warn=warn,
            )
            stack.callback(export.close)
            add_call, hear = _both(calls.add, export.call), export.attempt
            forward = export.forwarding.put
        endpoint = None
        if settings.receives_traces:

            def add(row: ModelCall | TimelineSpan) -> None:
                (calls if isinstance(row, ModelCall) else spans).add(row)  # pyright: ignore

            receiver = OtlpReceiver(
                add,
                traces,
                host=settings.receiver_host,
                secret=settings.receiver_secret,
                port=settings.receiver_port,
                forward=forward,
            )
            endpoint = (await stack.enter_async_context(receiver)).endpoint

        def evaluated(point: EvalPoint, result: EvalResult) -> None:
            numbers = eval_numbers(point, result)
            if shown is not None:
                shown.eval_point(point.name, numbers)
            if tracking is not None:
                tracking.eval_point(point.version, point.name, numbers)

        is_traced = settings.receives_traces or settings.export_to is not None
        events = EventLog(events_folder, hear=hear)
        stack.callback(events.close)
        stack.callback(events.flush)
        yield Recording(
            events=events,
            calls=CallLog(add_call, traces if is_traced else None),
            timeline=Timeline(spans.add),
            meter=meter,
            row=row,
            evaluated=evaluated,
            shown=shown,
            traces_endpoint=endpoint,
        )


def _close(tracking: Tracking, kind: type[BaseException] | None, *_: object) -> None:
    tracking.close("failed" if kind else "finished")


def _both(first: Callable[[Row], None], second: Callable[[Row], None]) -> Callable[[Row], None]:
    def call(row: Row) -> None:
        first(row)
        second(row)

    return call


def _nowhere(content: object) -> None:
    """Discard a value."""
