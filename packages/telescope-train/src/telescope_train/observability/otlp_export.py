"""Send the attempts and model calls of a run to the user's collector, as OpenTelemetry spans.

    attempt at a rollout          invoke_agent ENVIRONMENT
      model call                    chat MODEL
        the server's own span         llm_request, passed on by `otlp_receiver`

Names are from `genai_names`. If a collector does not answer, it loses spans, and nothing else
stops.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Lock, Thread
from typing import Any

import httpx
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_TRACES_HEADERS,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.re import parse_env_headers

from telescope_core.base import clock
from telescope_core.base.addresses import is_on_this_machine
from telescope_core.base.errors import ConfigError
from telescope_core.base.secret_names import without_passwords
from telescope_core.records.events import AttemptEvent, Stage
from telescope_core.records.timeline import ModelCall
from telescope_train.observability import genai_names as names
from telescope_train.observability.traces import Traces, traced_group

MOST_WAITING = 256
"""Most requests in the queue of `Forwarding`; further ones are dropped."""
SEND_S = 10.0
"""Seconds in which the collector must accept a request."""
_CLOSE_S = 2.0
_OF_SENDING = OTLPSpanExporter.__module__
_OF_QUEUE = "opentelemetry.sdk._shared_internal"
"""Loggers of the library: of the requests, and of the spans that wait for them."""
_PROTOBUF = {"content-type": "application/x-protobuf"}
_LOGGER = logging.getLogger(__name__)


class TraceExport:
    """Sends spans in its own threads. Call `close` at the end."""

    def __init__(
        self,
        endpoint: str,
        traces: Traces,
        *,
        run: str,
        model: str,
        parts_of_eval: Callable[[str], tuple[str, str]] = lambda folder: (folder, ""),
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`endpoint`: the whole address, such as `http://localhost:4318/v1/traces`.

        `parts_of_eval`: returns the environment and the tag of the folder of an eval. `warn` tells
        a person once that spans are lost; any thread may call it.
        """
        first = iter([warn])

        def warn_once(text: str) -> None:
            for tell in first:
                tell(text)

        self.forwarding = Forwarding(endpoint, warn=warn_once)
        """Forwards the traces of servers."""
        self._traces = traces
        self._model = model
        self._parts_of_eval = parts_of_eval
        self._resource = Resource.create({"service.name": names.SERVICE, names.RUN: run})
        self._begun: dict[tuple[str, int, int], float] = {}
        self._shown = without_passwords(endpoint)
        self._num_ended = 0
        self._exporter = _Exporter(endpoint, warn=warn_once)
        self._processor = BatchSpanProcessor(self._exporter)

    def attempt(self, event: AttemptEvent) -> None:
        """Process a stage of an attempt; its span is sent when it ends."""
        key = (event.group_id, event.index, event.attempt)
        now_s = clock.at(event.time_s)
        if event.stage is Stage.DRAWN:
            self._begun[key] = now_s
        if event.stage not in (Stage.DONE, Stage.FAILED, Stage.CANCELLED):
            return
        attributes: dict[str, Any] = {
            names.OPERATION: names.AGENT,
            names.AGENT_NAME: event.environment,
            names.CONVERSATION: f"{event.group_id}/{event.index}",
            names.STEP: event.step,
            names.ATTEMPT: event.attempt,
        }
        if event.reason:
            attributes[names.REASON] = event.reason
        self._send(
            name=f"{names.AGENT} {event.environment}",
            kind=SpanKind.INTERNAL,
            context=_context(self._traces.trace_id(*key), self._traces.root_id(*key)),
            start_time=_ns(self._begun.pop(key, now_s)),
            end_time=_ns(now_s),
            attributes=attributes,
            error=event.reason if event.stage is Stage.FAILED else "",
        )

    def call(self, call: ModelCall) -> None:
        """Send the span of a model call that has ended."""
        group = traced_group(call.environment, call.group_id, step=call.step)
        key = (group, call.index, call.attempt)
        environment, tag = call.environment, ""
        if call.step is None:
            environment, tag = self._parts_of_eval(call.environment)
        attributes: dict[str, Any] = {
            names.OPERATION: names.CHAT,
            names.AGENT_NAME: environment,
            names.PROVIDER: "vllm",
            names.REQUEST_MODEL: self._model,
            names.SERVER_ADDRESS: call.server,
            names.INPUT_TOKENS: call.num_prompt_tokens,
            names.OUTPUT_TOKENS: call.num_completion_tokens,
            names.CONVERSATION: f"{group}/{call.index}",
        }
        if tag:
            attributes[names.EVAL_TAG] = tag
        if call.version is not None:
            attributes[names.WEIGHT_VERSION] = call.version
        trace = self._traces.trace_id(*key)
        self._send(
            name=f"{names.CHAT} {self._model}",
            kind=SpanKind.CLIENT,
            context=_context(trace, self._traces.call_id(*key, call.call)),
            # An attempt of an eval has no span of its own.
            parent=None if call.step is None else _context(trace, self._traces.root_id(*key)),
            start_time=_ns(call.time_s),
            end_time=_ns(call.time_s + call.duration_s),
            attributes=attributes,
            error=call.error,
        )

    def close(self) -> None:
        """Send the rest of the spans, within seconds."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        self.forwarding.close(within_s=_CLOSE_S)
        sending.join(_CLOSE_S)
        if sending.is_alive():
            # A collector that is away is otherwise tried again for a minute.
            self._exporter.shutdown()
            sending.join()
        self._exporter.close()
        if num_lost := self._num_ended - self._exporter.num_sent:
            _LOGGER.warning(
                "%d spans of the run were not sent to %s, %d were",
                num_lost,
                self._shown,
                self._exporter.num_sent,
            )

    def _send(self, *, attributes: dict[str, Any], error: str, **fields: Any) -> None:
        """Send a span with these `fields` of `ReadableSpan`."""
        status = Status(StatusCode.UNSET)
        if error:
            attributes[names.ERROR_TYPE] = error
            status = Status(StatusCode.ERROR, error)
        self._num_ended += 1
        self._processor.on_end(
            ReadableSpan(resource=self._resource, attributes=attributes, status=status, **fields)
        )


class _Exporter(OTLPSpanExporter):
    """Sends the spans of the run, and tells a loss in one sentence in place of the library's."""

    def __init__(self, endpoint: str, *, warn: Callable[[str], None]) -> None:
        super().__init__(endpoint=endpoint, timeout=SEND_S)
        self.num_sent = 0
        """Number of spans that the collector accepted."""
        self._warn = warn
        self._is_closing = False
        self._why = "it does not answer in time"
        """The newest error of the library while the run goes on."""
        self._loggers = [logging.getLogger(name) for name in (_OF_SENDING, _OF_QUEUE)]
        for one in self._loggers:
            one.addFilter(self._keep)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; what is lost of it is told."""
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
        else:
            self._lose(self._why)
        return result

    def shutdown(self) -> None:
        """Give up what is being sent."""
        self._is_closing = True
        super().shutdown()

    def close(self) -> None:
        """Leave the loggers of the library as they were."""
        for one in self._loggers:
            one.removeFilter(self._keep)

    def _keep(self, record: logging.LogRecord) -> bool:
        """Take a message of the library, which would repeat it for each batch or span."""
        if record.name == _OF_QUEUE and record.levelno >= logging.WARNING:
            self._lose(record.getMessage())
        elif record.levelno >= logging.ERROR and not self._is_closing:
            self._why = record.getMessage()
        # A traceback means a defect.
        return record.exc_info is not None

    def _lose(self, why: str) -> None:
        self._warn(_loss(self._endpoint, why.rstrip(".")))


def _loss(endpoint: str, why: str) -> str:
    return without_passwords(
        f"the collector at {endpoint} does not take all spans: {why}. The run goes on, and further "
        "ones that are lost are only counted in its log"
    )


def _context(trace: bytes, span: bytes) -> SpanContext:
    return SpanContext(
        trace_id=int.from_bytes(trace),
        span_id=int.from_bytes(span),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)


def _headers_of_user() -> Mapping[str, str]:
    """Return the headers for collectors that the standard variables name, such as a key.

    The library reads them for the spans of the run, and nobody for those that are passed on.
    """
    given = os.environ.get(OTEL_EXPORTER_OTLP_HEADERS, "")
    given = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_HEADERS, given)
    return parse_env_headers(given, liberal=True)


class Forwarding:
    """Forwards traces of servers unchanged, in a thread that nobody waits for.

    Call `close` at the end.
    """

    def __init__(self, endpoint: str, *, warn: Callable[[str], None] = lambda text: None) -> None:
        """`warn` is called once, from any thread, with a text for people about lost requests."""
        self._endpoint = endpoint
        try:
            # Proxies of the variables are for collectors that are elsewhere.
            self._client = httpx.Client(
                headers={**_headers_of_user(), **_PROTOBUF},
                timeout=SEND_S,
                trust_env=not is_on_this_machine(endpoint),
            )
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"cannot send spans to {without_passwords(endpoint)} through the proxy that the "
                f"environment variables name: {error}; name one that speaks HTTP, or except "
                "the collector in no_proxy"
            ) from None
        self._warn = warn
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._holding = Lock()
        self._closes_s: float | None = None
        self.num_sent = 0
        self.num_lost = 0
        """Number of requests that the collector did not accept."""
        self._thread = Thread(target=self._work, name="traces of servers", daemon=True)
        self._thread.start()

    def put(self, content: bytes) -> None:
        """Forward `content`, from any thread; returns at once."""
        try:
            self._waiting.put_nowait(content)
        except queue.Full:
            self._lose(f"it is {MOST_WAITING} requests behind")

    def close(self, *, within_s: float) -> None:
        """Send the waiting spans, within `within_s` seconds; the rest is lost, and counted."""
        self._closes_s = time.monotonic() + within_s
        while self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=0.05)
                break
            except queue.Full:
                if time.monotonic() > self._closes_s:
                    break
        self._thread.join(max(0.0, self._closes_s - time.monotonic()))
        while not self._waiting.empty():
            if self._waiting.get_nowait() is not None:
                self._lose("the run has ended")
        if self.num_lost:
            _LOGGER.warning(
                "%d requests with spans of servers were not passed on to %s, %d were",
                self.num_lost,
                without_passwords(self._endpoint),
                self.num_sent,
            )

    def _work(self) -> None:
        with self._client as client:
            while (content := self._waiting.get()) is not None:
                try:
                    client.post(self._endpoint, content=content).raise_for_status()
                    self.num_sent += 1
                except httpx.HTTPError as error:
                    self._lose(f"{type(error).__name__}: {error}")
                if self._closes_s is not None and time.monotonic() > self._closes_s:
                    return

    def _lose(self, why: str) -> None:
        with self._holding:
            self.num_lost += 1
            is_first = self.num_lost == 1
        if is_first:
            self._warn(_loss(self._endpoint, why))
