"""Receive spans of inference servers, as OTLP over HTTP with protobuf.

A request of this run is in `calls/` anyway, with the same numbers, so its span is only passed on.
Any other request to a server, such as one of a person who tries the model, becomes a row of
`calls/`, and every other span of a server a row of `timeline/`.
"""

import asyncio
import hmac
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from telescope_core.base.addresses import in_url
from telescope_core.base.errors import ConfigError
from telescope_core.records.timeline import ModelCall, TimelineSpan
from telescope_train.observability import genai_names as names
from telescope_train.observability.traces import Traces

PATH = "/v1/traces"
PROTOBUF = "application/x-protobuf"
MOST_BYTES = 64 * 2**20
"""Largest request after unpacking."""
Row = ModelCall | TimelineSpan


class OtlpReceiver:
    """Listens for spans. Use it as an async context manager."""

    def __init__(
        self,
        add: Callable[[Row], None],
        traces: Traces,
        *,
        host: str,
        port: int = 0,
        secret: str = "",
        forward: Callable[[bytes], None] = lambda content: None,
    ) -> None:
        """`forward` is called with each unchanged request. `port` 0 = a free one.

        `secret` is what who sends spans has to show; empty = nothing.
        """
        self._expected = f"Bearer {secret}".encode() if secret else b""
        self._add = add
        self._traces = traces
        self._host = host
        self._port = port
        self._forward = forward
        self._runner: web.AppRunner | None = None
        self.num_of_run = 0
        """Spans of this run's requests."""

    @property
    def endpoint(self) -> str:
        """Address for exporters."""
        return f"http://{in_url(self._host)}:{self._port}{PATH}"

    async def __aenter__(self) -> "OtlpReceiver":
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post(PATH, self._take)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"expected a free port {self._port} at {self._host} for the traces of servers: "
                f"{error.strerror}; set otlp_receiver_port to another one, or to 0 for any"
            ) from None
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode()
        if self._expected and not hmac.compare_digest(given, self._expected):
            return web.Response(status=401, text="expected the secret of the run")
        if request.content_type != PROTOBUF:
            return web.Response(
                status=415,
                text=f"expected {PROTOBUF}, got {request.content_type}; set "
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf",
            )
        content = await request.read()
        try:
            rows = await asyncio.to_thread(self._rows_of, content)
        except DecodeError as error:
            return web.Response(status=400, text=f"expected spans as protobuf: {error}")
        for row in rows:
            self._add(row)
        self._forward(content)
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type=PROTOBUF)

    def _rows_of(self, content: bytes) -> list[Row]:
        message = ExportTraceServiceRequest.FromString(content)
        rows: list[Row] = []
        for server, span in _spans(message):
            if self._traces.has(span.trace_id):
                self.num_of_run += 1
            elif span.name == names.VLLM_REQUEST:
                rows.append(_call_of(server, span))
            else:
                rows.append(_span_of(server, span))
        return rows


def _spans(message: ExportTraceServiceRequest) -> Iterator[tuple[str, Any]]:
    """Yield (address of the server, span)."""
    for of_resource in message.resource_spans:
        server = str(_attributes(of_resource.resource).get(names.SERVER, "server"))
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield server, span


def _attributes(holder: Any) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in holder.attributes
    }


def _call_of(server: str, span: Any) -> ModelCall:
    found = _attributes(span)
    return ModelCall(
        time_s=span.start_time_unix_nano / 1e9,
        duration_s=_duration_s(span),
        server=server,
        group_id=str(found.get(names.VLLM_REQUEST_ID, "")),
        queue_s=_number(found, names.VLLM_QUEUE_S),
        first_token_s=_number(found, names.VLLM_FIRST_TOKEN_S),
        prefill_s=_number(found, names.VLLM_PREFILL_S),
        decode_s=_number(found, names.VLLM_DECODE_S),
        num_prompt_tokens=int(_number(found, names.VLLM_PROMPT_TOKENS) or 0),
        num_completion_tokens=int(_number(found, names.VLLM_COMPLETION_TOKENS) or 0),
    )


def _span_of(server: str, span: Any) -> TimelineSpan:
    return TimelineSpan(
        time_s=span.start_time_unix_nano / 1e9,
        duration_s=_duration_s(span),
        name=span.name,
        source=server,
    )


def _duration_s(span: Any) -> float:
    return max(0, span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def _number(found: dict[str, Any], name: str) -> float | None:
    value = found.get(name)
    return float(value) if isinstance(value, int | float) else None
