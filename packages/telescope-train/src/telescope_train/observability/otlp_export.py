"""Send the attempts and model calls of a run to the user's collector, as OpenTelemetry spans.

    attempt at a rollout          invoke_agent ENVIRONMENT
      model call                    chat MODEL
        the server's own span         llm_request, passed on by `otlp_receiver`

Names are from `genai_names`. If a collector does not answer, it loses spans, and nothing else
stops.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from telescope_core.records.events import AttemptEvent, Stage
from telescope_core.records.timeline import ModelCall
from telescope_train.observability import genai_names as names
from telescope_train.observability.forwarding import Forwarding
from telescope_train.observability.timeline import Clock
from telescope_train.observability.traces import Traces

_SEND_S = 10.0
_CLOSE_S = 2.0


class TraceExport:
    """Sends spans in its own threads. Call `close` at the end."""

    def __init__(
        self,
        endpoint: str,
        traces: Traces,
        *,
        run: str,
        model: str,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`endpoint`: the whole address, such as `http://localhost:4318/v1/traces`.

        `warn` tells a person that spans of servers are lost; any thread may call it.
        """
        self.forwarding = Forwarding(endpoint, warn=warn)
        """Forwards the traces of servers."""
        self._traces = traces
        self._model = model
        self._clock = Clock()
        self._resource = Resource.create({"service.name": "telescope", "telescope.run": run})
        self._begun: dict[tuple[str, int, int], float] = {}
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S)
        self._processor = BatchSpanProcessor(self._exporter)
        # It is said once that the collector does not answer, and not with every batch.
        logging.getLogger(type(self._exporter).__module__).addFilter(_Once())

    def attempt(self, event: AttemptEvent) -> None:
        """Process a stage of an attempt; its span is sent when it ends."""
        key = (event.group_id, event.index, event.attempt)
        now_s = self._clock.at(event.time_s)
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
        key = (call.group_id, call.index, call.attempt)
        attributes: dict[str, Any] = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: "vllm",
            names.REQUEST_MODEL: self._model,
            names.SERVER_ADDRESS: call.server,
            names.INPUT_TOKENS: call.num_prompt_tokens,
            names.OUTPUT_TOKENS: call.num_completion_tokens,
            names.CONVERSATION: f"{call.group_id}/{call.index}",
        }
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

    def forward(self, content: bytes) -> None:
        """Forward the traces of a server unchanged."""
        self.forwarding.put(content)

    def close(self) -> None:
        """Send the rest of the spans, within seconds."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        self.forwarding.close(within_s=_CLOSE_S)
        sending.join(_CLOSE_S)
        # A collector that is away is otherwise tried again for a minute.
        self._exporter.shutdown()
        sending.join()

    def _send(self, *, attributes: dict[str, Any], error: str, **fields: Any) -> None:
        """Send a span with these `fields` of `ReadableSpan`."""
        status = Status(StatusCode.UNSET)
        if error:
            attributes[names.ERROR_TYPE] = error
            status = Status(StatusCode.ERROR, error)
        self._processor.on_end(
            ReadableSpan(resource=self._resource, attributes=attributes, status=status, **fields)
        )


class _Once(logging.Filter):
    """Lets one message through."""

    def __init__(self) -> None:
        super().__init__()
        self._is_said = False

    def filter(self, record: logging.LogRecord) -> bool:
        is_first, self._is_said = not self._is_said, True
        return is_first


def _context(trace: bytes, span: bytes) -> SpanContext:
    return SpanContext(
        trace_id=int.from_bytes(trace),
        span_id=int.from_bytes(span),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
