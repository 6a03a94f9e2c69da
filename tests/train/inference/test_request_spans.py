"""Spans of requests: those of the token plane say what vLLM's own say, by the same names."""

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ALWAYS = {
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_to_first_token",
    "gen_ai.request.id",
    "gen_ai.usage.completion_tokens",
    "gen_ai.usage.prompt_tokens",
}
"""As vLLM 0.32 names them; the next ones where they are not 0."""
TOP_P, MAX_TOKENS = "gen_ai.request.top_p", "gen_ai.request.max_tokens"
TEMPERATURE, N = "gen_ai.request.temperature", "gen_ai.request.n"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"max_tokens": 64, "temperature": 0.7, "top_p": 0.95, "n": 1},
            {MAX_TOKENS: 64, TEMPERATURE: 0.7, TOP_P: 0.95, N: 1},
        ),
        ({"max_tokens": 1, "temperature": 0.0}, {MAX_TOKENS: 1, TOP_P: 1.0, N: 1}),
        ({"max_tokens": None, "n": 4}, {TEMPERATURE: 1.0, TOP_P: 1.0, N: 4}),
    ],
)
def test_both_ways_of_a_request_emit_the_same_names(
    asked: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    from vllm import SamplingParams
    from vllm.tracing import SpanAttributes
    from vllm.v1.engine import output_processor
    from vllm.v1.metrics.stats import RequestStateStats

    from telescope_train.inference.vllm_plugin import request_stats

    emitted: list[dict[str, Any]] = []
    for module in (output_processor, request_stats):
        monkeypatch.setattr(module, "instrument_manual", lambda **span: emitted.append(span))
    params = SamplingParams(**asked)
    stats = RequestStateStats(arrival_time=100.0)
    stats.queued_ts, stats.scheduled_ts = 1.0, 1.25
    stats.first_token_ts, stats.last_token_ts = 2.0, 5.0
    stats.first_token_latency, stats.num_generation_tokens = 1.5, 7

    output_processor.OutputProcessor.do_tracing(
        SimpleNamespace(),
        SimpleNamespace(trace_headers=None),
        SimpleNamespace(
            stats=stats,
            prompt_token_ids=[1, 2, 3],
            prompt_embeds=None,
            external_req_id="r1",
            top_p=params.top_p,
            max_tokens_param=params.max_tokens,
            temperature=params.temperature,
            n=params.n,
        ),
        SimpleNamespace(iteration_timestamp=104.0),
    )
    measured = request_stats.MeasuredRequest(
        num_prompt_tokens=3, max_tokens=params.max_tokens, stats=stats
    )
    request = SimpleNamespace(sampling_params=params, trace_headers=None)
    request_stats.emit_span("r1", measured, request)

    theirs, ours = emitted
    assert set(ours["attributes"]) == set(theirs["attributes"]) == ALWAYS | set(expected)
    different = {
        name: (value, theirs["attributes"][name])
        for name, value in ours["attributes"].items()
        if value != theirs["attributes"][name]
    }
    # Which is until now, and not until the engine's step.
    assert set(different) == {SpanAttributes.GEN_AI_LATENCY_E2E}
    assert expected.items() <= ours["attributes"].items()
    same = ("span_name", "start_time", "context", "kind")
    assert [ours[name] for name in same] == [theirs[name] for name in same]


def test_the_last_spans_of_a_server_are_sent_before_it_ends(monkeypatch: pytest.MonkeyPatch):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from telescope_train.inference.vllm_plugin import main

    sent, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(sent, schedule_delay_millis=10**8))
    num_sent: list[int] = []
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(main, "_run", lambda: provider.get_tracer("").start_span("one").end())
    monkeypatch.setattr("os._exit", lambda _: num_sent.append(len(sent.get_finished_spans())))
    main.main()
    assert num_sent == [1]
