"""Meters of machines and servers, what is kept of them, and what Prometheus finds."""

import asyncio
import math
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telescope_core.errors import ConfigError
from telescope_core.records.timeline import GaugeSample
from telescope_train.observability import meters as meters_module
from telescope_train.observability.meters import Meters
from telescope_train.observability.prometheus import PrometheusEndpoint, ServerStanding
from telescope_train.observability.system import NODE_METERS, NodeMeters, Reading
from telescope_train.observability.vllm_metrics import SERVER_METERS, meters, parse_page

PAGE = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="policy"}} 3.0
vllm:num_requests_running{{engine="1",model_name="policy"}} 4.0
vllm:num_requests_waiting{{engine="0",model_name="policy"}} 2.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="policy",reason="capacity"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="policy",reason="deferred"}} 1.0
vllm:kv_cache_usage_perc{{engine="0",model_name="policy"}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="policy"}} 0.5
vllm:generation_tokens_total{{engine="0",model_name="policy"}} {tokens}
vllm:request_success_total{{engine="0",finished_reason="stop"}} {requests}
vllm:request_success_total{{engine="0",finished_reason="length"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} 3.0
vllm:time_to_first_token_seconds_count{{engine="0"}} {requests}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {waited}
"""
FIRST = PAGE.format(tokens=1000.0, requests=5.0, queries=100.0, hits=40.0, waited=1.0)
LATER = PAGE.format(tokens="1.5e+03", requests=9.0, queries=200.0, hits=120.0, waited=3.0)


def test_rates_means_and_shares_are_over_the_time_between_two_pages():
    first, later = parse_page(FIRST, 10.0), parse_page(LATER, 12.0)
    at_first = dict(meters(first, None))
    assert at_first == {
        "vllm/requests_running": 7.0,
        "vllm/requests_waiting": 2.0,
        "vllm/requests_waiting_for_capacity": 1.0,
        "vllm/requests_waiting_deferred": 1.0,
        "vllm/kv_cache_used_share": 0.5,
    }
    found = dict(meters(later, first))
    assert found["vllm/generation_tokens_per_s"] == 250.0
    assert found["vllm/requests_per_s"] == 2.0
    assert found["vllm/time_to_first_token_s"] == 0.5
    assert found["vllm/prefix_cache_hit_share"] == 0.8
    assert set(found) <= set(SERVER_METERS)


def test_a_server_that_was_started_again_has_no_negative_rate():
    found = dict(meters(parse_page(FIRST, 12.0), parse_page(LATER, 10.0)))
    assert found["vllm/generation_tokens_per_s"] == 500.0
    assert all(value >= 0 for value in found.values())


def test_a_page_that_is_empty_or_strange_shows_nothing():
    for text in ("", "vllm:num_requests_running{", "no metrics at all", "vllm:odd NaN"):
        assert dict(meters(parse_page(text, 0.0), None)) == {}


def test_this_machine_has_meters(tmp_path: Path):
    node = NodeMeters(tmp_path)
    shown = {reading.name: reading.value for reading in node.read() if not reading.part}
    assert set(shown) == {name for name in NODE_METERS if not name.startswith("gpu/")}
    assert 0 <= shown["cpu/used_share"] <= 1
    assert 0 < shown["memory/used_bytes"] < shown["memory/total_bytes"]
    assert all(math.isfinite(value) and value >= 0 for value in shown.values())


class Node:
    """A machine that answers as it is told."""

    name = "one"

    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers

    async def read(self) -> Sequence[Reading]:
        if not self.answers:
            await asyncio.Event().wait()
        return [Reading("", "cpu/used_share", 0.5), Reading("gpu 0", "gpu/used_share", 0.75)]


class Server:
    """A server that shows pages, one after the other."""

    base_url = "http://a"

    def __init__(self, *pages: str | None) -> None:
        self.pages = list(pages)

    async def metrics_page(self) -> str | None:
        return self.pages.pop(0)


def test_who_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meters_module, "ANSWER_S", 0.05)
    found: list[GaugeSample] = []
    server = Server(FIRST, None, LATER)
    reading = Meters([Node(answers=False), Node()], lambda: [server], found.append, interval_s=1.0)

    async def main() -> None:
        for _ in range(3):
            await reading.read()

    asyncio.run(main())
    sources = {sample.source for sample in found}
    assert sources == {"node one", "node one gpu 0", "http://a"}
    assert len([one for one in found if one.name == "cpu/used_share"]) == 3
    # After a page that did not come, rates would be over a time in which anything happened.
    assert not [one for one in found if one.name == "vllm/generation_tokens_per_s"]


def scraped(endpoint: PrometheusEndpoint) -> dict[tuple[str, str], float]:
    """Return (name, the value of its label) -> value, read by Prometheus' own parser."""
    with urllib.request.urlopen(endpoint.address, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_finds_metrics_meters_and_servers():
    names = ["math", "math-hard", "ada/maze"]
    with PrometheusEndpoint("127.0.0.1", 0, environments=names) as endpoint:
        assert scraped(endpoint) == {}
        endpoint.row({"step": 3, "reward/mean": 0.5, "reward/math-hard/mean": 0.25, "text": "no"})
        endpoint.row({"step": 4, "reward/mean": 0.75, "reward/ada/maze/mean": None})
        endpoint.row({"step": 4, "reward/mean": 0.75, "reward/ada/maze/mean": 0.125})
        endpoint.meter(GaugeSample(time_s=1.0, source="node a", name="cpu/used_share", value=0.5))
        endpoint.meter(GaugeSample(time_s=2.0, source="node a", name="cpu/used_share", value=0.6))
        endpoint.servers = lambda: [
            ServerStanding(address="http://a", is_serving=True, version=4, life=2)
        ]
        assert scraped(endpoint) == {
            ("telescope_step", ""): 4.0,
            ("telescope_reward_mean", ""): 0.75,
            ("telescope_reward_mean", "ada/maze"): 0.125,
            ("telescope_cpu_used_share_meter", "node a"): 0.6,
            ("telescope_server_serving", "http://a"): 1.0,
            ("telescope_server_version", "http://a"): 4.0,
            ("telescope_server_lives", "http://a"): 2.0,
        }
        port = int(endpoint.address.split(":")[2].split("/")[0])
        with (
            pytest.raises(ConfigError, match=f"free port {port}.*prometheus_port"),
            PrometheusEndpoint("127.0.0.1", port, environments=[]),
        ):
            raise AssertionError("it is taken")


def test_every_meter_is_in_the_reference():
    page = (Path(__file__).parents[3] / "docs/reference/meters.md").read_text()
    missing = [name for name in (*NODE_METERS, *SERVER_METERS) if f"`{name}`" not in page]
    assert missing == []
