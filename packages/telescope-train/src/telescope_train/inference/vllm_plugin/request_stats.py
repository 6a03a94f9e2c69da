"""vLLM's own measurements for requests that bypass its output processor.

vLLM measures requests where it turns tokens into text. Tokens that go straight from the engine's
thread to the token plane are measured here, with vLLM's classes, so that they count in the same
metrics.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.tracing import SpanAttributes, SpanKind, extract_trace_context, instrument_manual
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

from telescope_train.observability.calls import ServerTiming

_NO_ADAPTERS = LoRARequestStates(log_stats=False)


@dataclass(slots=True)
class MeasuredRequest:
    """The measurements of one request."""

    num_prompt_tokens: int
    max_tokens: int | None
    stats: RequestStateStats = field(
        default_factory=lambda: RequestStateStats(arrival_time=time.time())
    )
    num_cached_tokens: int = 0
    is_prefilling: bool = True

    @classmethod
    def from_request(cls, request: EngineCoreRequest) -> "MeasuredRequest":
        """Start measuring `request`, which has just arrived."""
        params = request.sampling_params
        return cls(
            num_prompt_tokens=len(request.prompt_token_ids or ()),
            max_tokens=None if params is None else params.max_tokens,
        )

    @property
    def timing(self) -> ServerTiming:
        """The division of the request's time, once it has ended."""
        return timing_of(self.stats, self.num_cached_tokens)


class StepStats:
    """The work of one step of the engine for measured requests."""

    def __init__(self, timestamp: float) -> None:
        """`timestamp`: end of the step, on the engine's monotonic clock."""
        self._timestamp = timestamp
        self._stats = IterationStats()
        self._num_outputs = 0

    @property
    def found(self) -> IterationStats | None:
        """The counts; None = there are none."""
        return self._stats if self._num_outputs else None

    def add(self, measured: MeasuredRequest, output: EngineCoreOutput) -> None:
        """Measure an output of the step."""
        self._num_outputs += 1
        stats = self._stats
        if output.new_token_ids or output.finish_reason is None:
            if output.prefill_stats is not None:
                measured.num_cached_tokens = output.prefill_stats.num_cached_tokens
            stats.update_from_output(
                output,
                self._timestamp,
                measured.is_prefilling,
                measured.stats,
                _NO_ADAPTERS,
                None,
            )
            measured.is_prefilling = False
        if output.finish_reason is not None:
            self._finish(measured, output.request_id, output.finish_reason)

    def _finish(
        self, measured: MeasuredRequest, request_id: str, finish_reason: FinishReason
    ) -> None:
        self._stats.update_from_finished_request(
            finish_reason=finish_reason,
            request_id=request_id,
            num_prompt_tokens=measured.num_prompt_tokens,
            max_tokens_param=measured.max_tokens,
            req_stats=measured.stats,
            num_cached_tokens=measured.num_cached_tokens,
        )
        # vLLM counts these per request of a client, which may ask for several completions.
        self._stats.max_num_generation_tokens_iter.append(measured.stats.num_generation_tokens)
        self._stats.n_params_iter.append(1)


def timing_of(stats: RequestStateStats, num_cached_tokens: int) -> ServerTiming:
    """Return the division of the time of a request that has at least one token."""
    return ServerTiming(
        queue_s=_between(stats.queued_ts, stats.scheduled_ts),
        first_token_s=max(0.0, stats.first_token_latency),
        prefill_s=_between(stats.scheduled_ts, stats.first_token_ts),
        decode_s=_between(stats.first_token_ts, stats.last_token_ts),
        num_cached_tokens=num_cached_tokens,
    )


def _between(begin_s: float, end_s: float) -> float:
    # vLLM leaves a time at 0 until it is known.
    return max(0.0, end_s - begin_s) if begin_s and end_s else 0.0


def emit_span(request_id: str, measured: MeasuredRequest, request: EngineCoreRequest) -> None:
    """Emit the span that vLLM's output processor would have emitted."""
    stats, timing = measured.stats, measured.timing
    attributes: dict[str, Any] = {
        SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN: timing.first_token_s,
        SpanAttributes.GEN_AI_LATENCY_E2E: time.time() - stats.arrival_time,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE: timing.queue_s,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL: timing.prefill_s,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE: timing.decode_s,
        SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE: timing.prefill_s + timing.decode_s,
        SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: measured.num_prompt_tokens,
        SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: stats.num_generation_tokens,
        SpanAttributes.GEN_AI_REQUEST_ID: request_id,
    }
    if (params := request.sampling_params) is not None:
        asked = {
            SpanAttributes.GEN_AI_REQUEST_TOP_P: params.top_p,
            SpanAttributes.GEN_AI_REQUEST_MAX_TOKENS: params.max_tokens,
            SpanAttributes.GEN_AI_REQUEST_TEMPERATURE: params.temperature,
            SpanAttributes.GEN_AI_REQUEST_N: params.n,
        }
        # As vLLM does, which leaves a temperature of 0 out.
        attributes |= {name: value for name, value in asked.items() if value}
    instrument_manual(
        span_name="llm_request",
        start_time=int(stats.arrival_time * 1e9),
        attributes=attributes,
        context=extract_trace_context(request.trace_headers),
        kind=SpanKind.SERVER,
    )
