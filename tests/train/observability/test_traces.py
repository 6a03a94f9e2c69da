"""Traces: what servers tell is taken, what the run did is sent, and nobody is held up."""

import asyncio
import gzip
import logging
import socket
import threading
from functools import partial

import aiohttp
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from tests.collector import collector, spans_of

from telescope_core.errors import ConfigError
from telescope_core.records.events import AttemptEvent, Stage
from telescope_core.records.timeline import ModelCall, TimelineSpan
from telescope_train.config.eval_folders import eval_folder_name, parts_of_folder_name
from telescope_train.observability import genai_names as names
from telescope_train.observability import otlp_export
from telescope_train.observability.calls import CallEnd, Caller, CallLog
from telescope_train.observability.otlp_export import Forwarding, TraceExport
from telescope_train.observability.otlp_receiver import OtlpReceiver, Row
from telescope_train.observability.traces import Traces

DEADLINE_S = 120.0
SERVER = "http://127.0.0.1:8100"


def server_that_exports(endpoint: str) -> TracerProvider:
    """Return what emits spans as vLLM does: with the official exporter, each at its end."""
    provider = TracerProvider(resource=Resource.create({names.SERVER: SERVER}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def test_requests_of_others_and_spans_of_a_server_are_recorded():
    rows: list[Row] = []

    async def main() -> None:
        async with OtlpReceiver(rows.append, Traces.new(), host="127.0.0.1") as receiver:
            tracer = server_that_exports(receiver.endpoint).get_tracer("vllm")

            def emit() -> None:
                request = tracer.start_span(names.VLLM_REQUEST, start_time=5 * 10**18)
                request.set_attributes(
                    {
                        names.VLLM_REQUEST_ID: "chat-7",
                        names.VLLM_QUEUE_S: 0.25,
                        names.VLLM_PREFILL_S: 0.5,
                        names.VLLM_PROMPT_TOKENS: 12,
                        names.VLLM_COMPLETION_TOKENS: 3,
                    }
                )
                request.end(end_time=5 * 10**18 + 2 * 10**9)
                tracer.start_span("load weights", start_time=10**18).end(end_time=10**18 + 10**9)

            await asyncio.to_thread(emit)

    asyncio.run(main())
    request, loading = rows
    assert request == ModelCall(
        time_s=5e9,
        duration_s=2.0,
        server=SERVER,
        group_id="chat-7",
        queue_s=0.25,
        prefill_s=0.5,
        num_prompt_tokens=12,
        num_completion_tokens=3,
    )
    assert loading == TimelineSpan(time_s=1e9, duration_s=1.0, name="load weights", source=SERVER)


def test_requests_of_the_run_are_not_recorded_twice():
    rows: list[Row] = []
    traces = Traces.new()
    passed_on: list[bytes] = []

    async def main() -> None:
        receiver = OtlpReceiver(rows.append, traces, host="127.0.0.1", forward=passed_on.append)
        async with receiver:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            tracer = server_that_exports(receiver.endpoint).get_tracer("vllm")
            carrier = {"traceparent": traces.traceparent("b0p1", 2, 1, 3)}
            context = TraceContextTextMapPropagator().extract(carrier)
            await asyncio.to_thread(
                lambda: tracer.start_span(names.VLLM_REQUEST, context=context).end()
            )
            assert receiver.num_of_run == 1

    asyncio.run(main())
    assert rows == []
    (content,) = passed_on
    message = ExportTraceServiceRequest.FromString(content)
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert span.trace_id == traces.trace_id("b0p1", 2, 1)
    assert span.parent_span_id == traces.call_id("b0p1", 2, 1, 3)


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"\xff\xff not protobuf", "application/x-protobuf", 400),
        (b"{}", "application/json", 415),
    ],
)
def test_what_is_no_trace_is_refused_and_the_receiver_goes_on(content, kind, status):
    async def main() -> None:
        rows: list[Row] = []
        async with (
            OtlpReceiver(rows.append, Traces.new(), host="127.0.0.1") as receiver,
            aiohttp.ClientSession() as session,
        ):
            headers = {"content-type": kind}
            async with session.post(receiver.endpoint, data=content, headers=headers) as answer:
                assert answer.status == status
                assert "expected" in await answer.text()
            empty = gzip.compress(ExportTraceServiceRequest().SerializeToString())
            headers = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
            async with session.post(receiver.endpoint, data=empty, headers=headers) as answer:
                assert answer.status == 200
        assert rows == []

    asyncio.run(main())


PROTOBUF = {"content-type": "application/x-protobuf"}


def test_a_port_that_is_taken_is_named():
    async def main() -> None:
        async with OtlpReceiver(lambda row: None, Traces.new(), host="127.0.0.1") as first:
            port = int(first.endpoint.split(":")[2].split("/")[0])
            second = OtlpReceiver(lambda row: None, Traces.new(), host="127.0.0.1", port=port)
            with pytest.raises(ConfigError, match=f"{port}.*otlp_receiver_port"):
                await second.__aenter__()
            async with (
                aiohttp.ClientSession() as session,
                session.post(first.endpoint, data=b"", headers=PROTOBUF) as answer,
            ):
                assert answer.status == 200, "the first one goes on"

    asyncio.run(main())


def event(stage: Stage, time_s: float, **more) -> AttemptEvent:
    return AttemptEvent(
        time_s=time_s,
        step=4,
        environment="maze",
        group_id="b3p0",
        index=1,
        attempt=1,
        stage=stage,
        **more,
    )


def test_a_collector_gets_the_attempt_with_its_calls_in_one_trace():
    traces = Traces.new()
    with collector() as (endpoint, got):
        export = TraceExport(endpoint, traces, run="demo", model="tiny")
        export.attempt(event(Stage.DRAWN, 10.0))
        export.attempt(event(Stage.GENERATING, 11.0, call=1))
        call = ModelCall(
            time_s=1e9,
            duration_s=2.0,
            server=SERVER,
            environment="maze",
            group_id="b3p0",
            index=1,
            call=1,
            step=4,
            version=3,
            num_prompt_tokens=5,
            num_completion_tokens=7,
        )
        export.call(call)
        export.attempt(event(Stage.FAILED, 15.0, reason="environment_error"))
        export.close()
    spans = {span.name: span for span in spans_of(got)}
    chat, attempt = spans["chat tiny"], spans["invoke_agent maze"]
    assert chat.trace_id == attempt.trace_id == traces.trace_id("b3p0", 1, 1)
    assert chat.parent_span_id == attempt.span_id
    assert chat.span_id == traces.call_id("b3p0", 1, 1, 1)
    assert attempt.end_time_unix_nano - attempt.start_time_unix_nano == 5 * 10**9
    assert attempt.status.message == "environment_error"
    attributes = {one.key: one.value for one in chat.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 7
    assert attributes["telescope.weight_version"].int_value == 3
    assert attributes["gen_ai.agent.name"].string_value == "maze"


def test_each_eval_of_a_run_has_traces_of_its_own_that_name_it():
    """Every eval gives its groups the same names; what servers are told agrees with the spans."""
    traces = Traces.new()
    evals = [("./maze.py:Maze", "before"), ("./maze.py:Maze", "step-2"), ("words", "before")]
    told: set[str] = set()
    with collector() as (endpoint, got):
        parts = partial(parts_of_folder_name, environments=["./maze.py:Maze", "words"])
        export = TraceExport(endpoint, traces, run="demo", model="tiny", parts_of_eval=parts)
        log = CallLog(export.call, traces)
        for name, tag in evals:
            caller = Caller(
                environment=eval_folder_name(name, tag),
                group_id="eval-000000",
                index=0,
                attempt=1,
                call=1,
                step=None,
            )
            watching = log.watching(caller)
            told.add(watching.traceparent)
            end = CallEnd(server=SERVER, version=3, sent_s=1.0, ended_s=2.0, num_prompt_tokens=5)
            watching.on_end(end)
        export.close()
    spans = spans_of(got)
    assert {f"00-{one.trace_id.hex()}-{one.span_id.hex()}-01" for one in spans} == told
    assert len({one.trace_id for one in spans}) == len({one.span_id for one in spans}) == 3
    found = [{one.key: one.value.string_value for one in span.attributes} for span in spans]
    assert [(one["gen_ai.agent.name"], one["telescope.eval_tag"]) for one in found] == evals
    assert len({one["gen_ai.conversation.id"] for one in found}) == 3


def test_an_exporter_that_has_sent_everything_is_shut_down_once(monkeypatch):
    """Each further time, its library warns that it is shut down already."""
    shut: list[None] = []
    shutdown = otlp_export.OTLPSpanExporter.shutdown

    def counted(exporter) -> None:
        shut.append(None)
        shutdown(exporter)

    monkeypatch.setattr(otlp_export.OTLPSpanExporter, "shutdown", counted)
    monkeypatch.setattr(otlp_export, "_CLOSE_S", DEADLINE_S)
    with collector() as (endpoint, _):
        TraceExport(endpoint, Traces.new(), run="demo", model="tiny").close()
    assert len(shut) == 1


def test_a_loss_is_told_in_one_sentence_and_the_lines_of_the_library_are_kept_off(
    monkeypatch, caplog
):
    """A collector that is slow, and one that refuses: the library has lines for each."""
    sending = otlp_export.OTLPSpanExporter.__module__

    def slow(exporter, spans) -> SpanExportResult:
        log = logging.getLogger(sending)
        log.warning("Transient error %s, retrying in %.2fs.", "HTTPConnectionPool()", 1.0)
        log.error("Failed to export %s batch due to timeout.", "spans")
        return SpanExportResult.FAILURE

    told: list[str] = []
    monkeypatch.setattr(otlp_export.OTLPSpanExporter, "export", slow)
    export = TraceExport("http://a/v1/traces", Traces.new(), run="r", model="m", warn=told.append)
    for number in range(3):
        export.attempt(event(Stage.DRAWN, float(number)))
        export.attempt(event(Stage.DONE, number + 1.0))
        logging.getLogger("opentelemetry.sdk._shared_internal").warning(
            "Queue full, dropping %s.", f"Span {number}"
        )
    export.close()
    (text,) = told
    assert text.startswith("the collector at http://a/v1/traces does not take all spans: ")
    assert "Queue full, dropping Span 0. The run goes on" in text
    assert [record.getMessage() for record in caplog.records] == [
        "3 spans of the run were not sent to http://a/v1/traces, 0 were"
    ]
    logging.getLogger(sending).warning("of another exporter")
    assert caplog.records[-1].getMessage() == "of another exporter"


def test_a_batch_that_fails_is_told_with_the_reason(monkeypatch, caplog):
    def refused(exporter, spans) -> SpanExportResult:
        logging.getLogger(otlp_export.OTLPSpanExporter.__module__).error("code: 404")
        return SpanExportResult.FAILURE

    told: list[str] = []
    monkeypatch.setattr(otlp_export.OTLPSpanExporter, "export", refused)
    export = TraceExport("http://a/v1/traces", Traces.new(), run="r", model="m", warn=told.append)
    export.attempt(event(Stage.DRAWN, 1.0))
    export.attempt(event(Stage.DONE, 2.0))
    export.close()
    (text,) = told
    assert "does not take all spans: code: 404. The run goes on" in text


@pytest.mark.slow
def test_a_collector_that_does_not_answer_stops_nothing_and_is_said_once():
    with collector() as (endpoint, _):
        pass  # it is gone now
    told: list[str] = []
    export = TraceExport(endpoint, Traces.new(), run="demo", model="tiny", warn=told.append)
    for number in range(3):
        export.attempt(event(Stage.DRAWN, float(number)))
        export.attempt(event(Stage.DONE, number + 1.0))
        export.forwarding.put(b"anything")
    export.close()
    (text,) = told
    assert f"collector at {endpoint} does not take all spans: " in text
    assert "ConnectError" in text
    assert (export.forwarding.num_sent, export.forwarding.num_lost) == (0, 3)


def test_what_servers_send_is_passed_on_as_it_came_and_counted():
    with collector() as (endpoint, got):
        forwarding = Forwarding(endpoint)
        for _ in range(20):
            forwarding.put(ExportTraceServiceRequest().SerializeToString())
        forwarding.close(within_s=DEADLINE_S)
        assert len(got) == forwarding.num_sent == 20
    assert forwarding.num_lost == 0


@pytest.mark.parametrize("variable", ["TRACES_HEADERS", "HEADERS"])
def test_a_collector_with_a_key_gets_the_spans_of_the_run_and_those_of_servers(
    monkeypatch, variable
):
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", "x-key=a%20key")
    told: list[str] = []
    with collector(key="a key") as (endpoint, got):
        export = TraceExport(endpoint, Traces.new(), run="r", model="m", warn=told.append)
        export.forwarding.put(ExportTraceServiceRequest().SerializeToString())
        export.attempt(event(Stage.DRAWN, 1.0))
        export.attempt(event(Stage.DONE, 2.0))
        export.close()
    assert told == []
    assert sorted(len(spans_of([one])) for one in got) == [0, 1]


def test_what_is_told_of_a_collector_has_no_password(monkeypatch, caplog):
    monkeypatch.setattr(otlp_export.OTLPSpanExporter, "export", lambda *_: SpanExportResult.FAILURE)
    told: list[str] = []
    with collector() as (address, _):
        pass  # it is gone now
    endpoint = address.replace("://", "://bob:hunter2@") + "?api_key=hunter2"
    export = TraceExport(endpoint, Traces.new(), run="r", model="m", warn=told.append)
    export.attempt(event(Stage.DRAWN, 1.0))
    export.attempt(event(Stage.DONE, 2.0))
    export.forwarding.put(b"anything")
    export.close()
    said = [*told, *(one.getMessage() for one in caplog.records)]
    assert len(said) == 3
    assert all(address in one for one in said)
    assert "hunter2" not in "".join(said)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_no_proxy_stands_before_a_collector_of_this_machine(monkeypatch, variable):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with collector() as (endpoint, got):
        forwarding = Forwarding(endpoint)
        forwarding.put(ExportTraceServiceRequest().SerializeToString())
        forwarding.close(within_s=DEADLINE_S)
        assert len(got) == 1
    monkeypatch.setenv(variable, "ftp://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"otel\.invalid.*proxy.*no_proxy"):
        Forwarding("http://otel.invalid/v1/traces")


def test_a_collector_that_hangs_costs_one_thread_and_a_bounded_number_of_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(otlp_export, "MOST_WAITING", 4)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        forwarding = Forwarding(endpoint, warn=told.append)
        num_threads = threading.active_count()
        forwarding.put(b"first")
        connection, _ = silent.accept()  # and no answer is ever given
        for _ in range(30):
            forwarding.put(b"more")
        assert threading.active_count() <= num_threads
        assert forwarding.num_lost == 26
        forwarding.close(within_s=0.0)
        connection.close()
    (text,) = told
    assert "4 requests behind" in text
    # Those that waited are lost with the run; the first one may still be on its way.
    assert forwarding.num_lost >= 30
    assert "requests with spans of servers were not passed on" in caplog.text
