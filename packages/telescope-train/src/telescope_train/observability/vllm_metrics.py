"""The meters of inference servers, from vLLM's Prometheus text (names of vLLM 0.32).

A page has a thousand lines, most of them histogram buckets. These are skipped, because every server
is asked every second.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+|NaN)$")
_REASON = re.compile(r'reason="(\w+)"')

_GAUGES = {
    "num_requests_running": "vllm/requests_running",
    "num_requests_waiting": "vllm/requests_waiting",
}
"""Metrics that are summed over the engines of a server."""
_RATES = {
    "prompt_tokens_total": "vllm/prompt_tokens_per_s",
    "generation_tokens_total": "vllm/generation_tokens_per_s",
    "num_preemptions_total": "vllm/preemptions_per_s",
    "request_success_total": "vllm/requests_per_s",
}
_MEANS = {
    "time_to_first_token_seconds": "vllm/time_to_first_token_s",
    "inter_token_latency_seconds": "vllm/inter_token_latency_s",
    "request_queue_time_seconds": "vllm/queue_s",
    "request_prefill_time_seconds": "vllm/prefill_s",
    "request_decode_time_seconds": "vllm/decode_s",
    "e2e_request_latency_seconds": "vllm/request_s",
}
"""Histograms, recorded as the mean since the previous reading."""
_WAITING_FOR = "num_requests_waiting_by_reason"
_CACHE_USE, _CACHE_USE_NAME = "kv_cache_usage_perc", "vllm/kv_cache_used_share"
_HITS, _QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"
_HIT_NAME = "vllm/prefix_cache_hit_share"
SERVER_METERS = (
    *_GAUGES.values(),
    *("vllm/requests_waiting_for_capacity", "vllm/requests_waiting_deferred"),
    _CACHE_USE_NAME,
    _HIT_NAME,
    *_RATES.values(),
    *_MEANS.values(),
)
"""All possible names of meters of a server."""
_REASONS = {
    "capacity": "vllm/requests_waiting_for_capacity",
    "deferred": "vllm/requests_waiting_deferred",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics of a server at one moment."""

    time_s: float
    """Time on any monotonic clock."""
    values: Mapping[str, float]
    """vLLM's name -> sum over engines and labels; for waiting requests also `NAME/REASON`."""
    cache_use: float | None
    """Cache use of the fullest engine."""


def parse_page(text: str, time_s: float) -> Page:
    """Read vLLM's Prometheus text."""
    values: dict[str, float] = {}
    cache_use: float | None = None
    for line in text.split("\n"):
        if "_bucket{" in line or (found := _LINE.match(line)) is None:
            continue
        name, labels, value = found[1], found[2] or "", float(found[3])
        if name == _CACHE_USE:
            cache_use = value if cache_use is None else max(cache_use, value)
        elif name == _WAITING_FOR and (reason := _REASON.search(labels)):
            key = f"{name}/{reason[1]}"
            values[key] = values.get(key, 0.0) + value
        else:
            values[name] = values.get(name, 0.0) + value
    return Page(time_s, values, cache_use)


def meters(page: Page, before: Page | None) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of a server's meters; rates and means need the page `before`."""
    values = page.values
    now = {ours: theirs for theirs, ours in _GAUGES.items()}
    now |= {ours: f"{_WAITING_FOR}/{reason}" for reason, ours in _REASONS.items()}
    for ours, theirs in now.items():
        if theirs in values:
            yield ours, values[theirs]
    if page.cache_use is not None:
        yield _CACHE_USE_NAME, page.cache_use
    if before is not None:
        yield from _since(page, before)


def _since(page: Page, before: Page) -> Iterator[tuple[str, float]]:
    """Yield the changes between two pages.

    A server that was started again counts from 0, which is no negative rate.
    """

    def change(name: str) -> float:
        newer, older = page.values.get(name, 0.0), before.values.get(name, 0.0)
        return newer if newer < older else newer - older

    seconds = max(1e-3, page.time_s - before.time_s)
    for theirs, ours in _RATES.items():
        if theirs in page.values:
            yield ours, change(theirs) / seconds
    for theirs, ours in _MEANS.items():
        if count := change(f"{theirs}_count"):
            yield ours, change(f"{theirs}_sum") / count
    if queries := change(_QUERIES):
        yield _HIT_NAME, change(_HITS) / queries
