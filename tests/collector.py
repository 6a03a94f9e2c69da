"""A collector of OpenTelemetry spans, as a user may run one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 60.0


@contextmanager
def collector(key: str = "") -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector of the user's, which refuses who does not show the key in `x-key`."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            is_let_in = self.headers.get("x-key", "") == key
            if is_let_in:
                got.append(ExportTraceServiceRequest.FromString(content))
            self.send_response(200 if is_let_in else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)
        server.server_close()


def spans_of(got: list[ExportTraceServiceRequest]) -> list[Span]:
    """Return all spans that a collector got."""
    return [
        span
        for message in got
        for of_resource in message.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]
