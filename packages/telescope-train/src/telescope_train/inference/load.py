"""How busy an inference server is, read from its metrics."""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """What a server is doing at one moment."""

    cache_use: float
    """Share of the key-value cache that is in use, 0 to 1; the fullest engine counts."""
    num_preemptions: int
    """Requests that lost their cache to others since the server started, and are computed again."""
    num_running: int
    num_waiting: int


def parse_load(text: str) -> ServerLoad | None:
    """Return the load in vLLM's Prometheus text; None if what is needed is not there."""
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        found.setdefault(name, []).append(float(value))
    use = found.get("kv_cache_usage_perc")
    if use is None:
        return None
    return ServerLoad(
        # With data parallelism a server has several engines, each with a cache of its own.
        cache_use=max(use),
        num_preemptions=int(sum(found.get("num_preemptions_total", ()))),
        num_running=int(sum(found.get("num_requests_running", ()))),
        num_waiting=int(sum(found.get("num_requests_waiting", ()))),
    )
