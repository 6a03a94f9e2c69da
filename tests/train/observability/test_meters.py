"""Meters of machines and servers, what is kept of them, and what Prometheus finds."""

import asyncio
import math
import sys
import time
import urllib.request
from collections import Counter, namedtuple
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from telescope_core.errors import ConfigError
from telescope_core.records.timeline import GaugeSample
from telescope_train.cluster.node_meters import ClusterNodes
from telescope_train.observability import meters as meters_module
from telescope_train.observability import system as system_module
from telescope_train.observability.meters import SERVER_METERS, Meters, meters, parse_page
from telescope_train.observability.prometheus import PrometheusEndpoint, ServerStanding
from telescope_train.observability.system import NODE_METERS, NodeMeters, Reading

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


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Sequence[float]], None]:
    """Return a function that sets the clock, and the seconds of a machine's processors."""
    times = namedtuple("times", "user nice system idle iowait irq softirq steal guest guest_nice")

    def count(time_s: float, seconds: Sequence[float]) -> None:
        monkeypatch.setattr(system_module.time, "monotonic", lambda: time_s)
        monkeypatch.setattr(system_module.psutil, "cpu_times", lambda: times(*seconds))

    return count


def test_the_share_of_the_processors_is_over_the_time_between_readings_in_any_thread(
    tmp_path: Path, counting: Callable[[float, Sequence[float]], None]
):
    counting(10.0, (100, 0, 50, 400, 50, 0, 0, 0, 20, 0))
    node = NodeMeters(tmp_path)
    # Of 20 s that two processors had, they waited for 8 and worked for 12; 3 of these for guests.
    counting(20.0, (108, 0, 53, 406, 52, 0, 1, 0, 23, 0))
    with ThreadPoolExecutor(1) as other:
        (share,) = [one.value for one in other.submit(node.read).result() if "cpu" in one.name]
    assert share == pytest.approx(12 / 20)
    # A reading that follows at once has too little time for rates, and does not end that of others.
    counting(20.05, (108, 0, 53, 406, 52, 0, 1, 0, 23, 0))
    assert {one.name for one in node.read() if not one.part} == {
        "memory/used_bytes",
        "memory/total_bytes",
        "disk/free_bytes",
    }
    counting(30.0, (118, 0, 63, 406, 52, 0, 1, 0, 23, 0))
    (share,) = [one.value for one in node.read() if "cpu" in one.name]
    assert share == 1.0


def test_this_machine_has_meters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(system_module, "LEAST_S", 0.0)
    node = NodeMeters(tmp_path)
    # Until the machine has counted on: in hundredths of a second.
    give_up_s = time.monotonic() + 120
    found = node.read()
    while not any(one.name == "cpu/used_share" for one in found):
        assert time.monotonic() < give_up_s, found
        found = node.read()
    shown = {reading.name: reading.value for reading in found if not reading.part}
    assert set(shown) == {name for name in NODE_METERS if not name.startswith("gpu/")}
    assert 0 <= shown["cpu/used_share"] <= 1
    assert 0 < shown["memory/used_bytes"] < shown["memory/total_bytes"]
    assert all(math.isfinite(value) and value >= 0 for value in shown.values())


class Node:
    """A machine that answers as it is told."""

    def __init__(self, name: str = "one", *, answers: bool = True) -> None:
        self.name = name
        self.answers = answers
        self.is_gone = False

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


@pytest.mark.slow
def test_who_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meters_module, "ANSWER_S", 0.05)
    found: list[GaugeSample] = []
    server = Server(FIRST, None, LATER)
    nodes = there([Node(answers=False), Node()])
    reading = Meters(nodes, lambda: [server], found.append, interval_s=1.0)

    async def main() -> None:
        for _ in range(3):
            await reading.read()

    asyncio.run(main())
    sources = {sample.source for sample in found}
    assert sources == {"node one", "node one gpu 0", "http://a"}
    read = Counter(one.name for one in found)
    assert read["cpu/used_share"] == 3
    # After a page that did not come, rates would be over a time in which anything happened.
    rate = "vllm/generation_tokens_per_s"
    assert rate in SERVER_METERS
    assert rate not in read


def there(nodes: Sequence[Node]) -> Callable[[], Any]:
    """Return what asks which machines there are."""

    async def ask() -> Sequence[Node]:
        return list(nodes)

    return ask


def test_a_reading_at_once_after_another_has_no_rates_and_the_next_one_covers_all(
    monkeypatch: pytest.MonkeyPatch,
):
    found: list[GaugeSample] = []
    reading = Meters(there([]), lambda: [server], found.append, interval_s=1.0)
    server = Server(FIRST, LATER, LATER)

    async def main() -> None:
        await reading.read()
        await reading.read()
        assert {one.name for one in found} & set(_RATES) == set()
        monkeypatch.setattr(meters_module, "LEAST_S", 0.0)
        await reading.read()

    asyncio.run(main())
    rates = {one.name: one.value for one in found if one.name in _RATES}
    assert rates["vllm/time_to_first_token_s"] == 0.5


_RATES = ("vllm/generation_tokens_per_s", "vllm/time_to_first_token_s")


def ray_says(*alive: str, dead: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """Return machines as `ray.nodes` does; an id is the host and a number."""
    return [
        {"NodeID": node_id, "NodeManagerHostname": node_id.split("-")[0], "Alive": is_alive}
        for is_alive, ids in ((True, alive), (False, dead))
        for node_id in ids
    ]


async def test_machines_that_join_and_come_back_have_meters():
    opened: list[tuple[str, str]] = []
    listed = [ray_says("a-1")]

    def list_nodes() -> Sequence[Mapping[str, Any]]:
        if not listed:
            raise RuntimeError("the head of the cluster does not answer")
        return listed.pop(0)

    def open_node(name: str, node_id: str) -> Node:
        opened.append((name, node_id))
        return Node(name)

    nodes = ClusterNodes(list_nodes, open_node, list_every_s=0.0)
    assert [one.name for one in await nodes()] == ["a"]
    listed.append(ray_says("a-1", "b-1"))
    first, second = await nodes()
    assert (first.name, second.name) == ("a", "b")
    listed.append(ray_says("a-1", dead=["b-1"]))
    assert list(await nodes()) == [first]
    listed.append(ray_says("a-1", "b-2", dead=["b-1"]))
    assert [one.name for one in await nodes()] == ["a", "b"]
    # Two containers of one host, and a machine on which what reads has died.
    first.is_gone = True
    listed.append(ray_says("a-1", "b-2", "b-3"))
    assert [one.name for one in await nodes()] == ["b", "a", "b b-3"]
    assert opened == [("a", "a-1"), ("b", "b-1"), ("b", "b-2"), ("a", "a-1"), ("b b-3", "b-3")]
    assert len(await nodes()) == 3, "a head that does not answer changes nothing"


def scraped(endpoint: PrometheusEndpoint) -> dict[tuple[str, str], float]:
    """Return (name, the value of its label) -> value, read by Prometheus' own parser."""
    with urllib.request.urlopen(endpoint.address, timeout=120) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_prometheus_finds_metrics_meters_and_servers():
    names = ["math", "math-hard", "ada/maze"]
    with PrometheusEndpoint("127.0.0.1", 0, environments=names) as endpoint:
        assert scraped(endpoint) == {}
        endpoint.row({"step": 3, "reward/mean": 0.5, "reward/math-hard/mean": 0.25, "text": "no"})
        endpoint.row({"step": 4, "reward/mean": 0.75, "reward/ada/maze/mean": None})
        endpoint.row({"step": 4, "reward/mean": 0.75, "reward/ada/maze/mean": 0.125})
        for value in (0.5, 0.6):
            sample = GaugeSample(time_s=1.0, source="node a", name="cpu/used_share", value=value)
            endpoint.meters("node a", [sample])
        endpoint.eval_point("math", {"pass@1": 0.5, "pass@1/low": 0.25, "version": 3.0})
        endpoint.eval_point("math", {"pass@1": 0.75, "version": 4.0})
        endpoint.servers = lambda: [
            ServerStanding(address="http://a", is_serving=True, version=4, life=2)
        ]
        assert scraped(endpoint) == {
            ("telescope_step", ""): 4.0,
            ("telescope_reward_mean", ""): 0.75,
            ("telescope_reward_mean", "ada/maze"): 0.125,
            ("telescope_cpu_used_share_meter", "node a"): 0.6,
            ("telescope_eval_pass_1", "math"): 0.75,
            ("telescope_eval_version", "math"): 4.0,
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


@pytest.mark.slow
def test_prometheus_forgets_what_does_not_answer_or_is_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(meters_module, "ANSWER_S", 0.05)
    nodes, servers = [Node("a"), Node("b")], [Server(FIRST, FIRST, None, LATER)]
    with PrometheusEndpoint("127.0.0.1", 0, environments=[]) as endpoint:
        reading = Meters(
            there(nodes),
            lambda: servers,
            lambda sample: None,
            interval_s=1.0,
            show=endpoint.meters,
        )

        def sources() -> set[str]:
            asyncio.run(_once(reading))
            return {label for _, label in scraped(endpoint)}

        nodes_shown = {"node a", "node a gpu 0", "node b", "node b gpu 0"}
        assert sources() == {*nodes_shown, "http://a"}
        nodes[1].answers = False
        assert sources() == {"node a", "node a gpu 0", "http://a"}
        nodes[1].answers = True
        assert sources() == nodes_shown, "the server does not answer"
        del nodes[0]
        assert sources() == {"node b", "node b gpu 0", "http://a"}
        servers.clear()
        assert sources() == {"node b", "node b gpu 0"}


async def _once(reading: Meters) -> None:
    await reading.read()


class FakeNvml:
    """NVIDIA's library with two GPUs, of which the second has no meter of its power."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        """What it raises."""

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.is_lost = False

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        if self.is_lost and gpu == 0:
            raise self.NVMLError("GPU is lost")
        return namedtuple("rates", "gpu memory")(75, 10)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return namedtuple("memory", "used total")(2**30, 2**36)

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 40 + gpu

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 1:
            raise self.NVMLError("Not Supported")
        return 350_500

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:
        return {1: 1980, 2: 2619}[clock]


def test_gpus_have_the_meters_that_nvml_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    node = NodeMeters(tmp_path)
    found = {(one.part, one.name): one.value for one in node.read() if one.part}
    of_first = {name: value for (part, name), value in found.items() if part == "gpu 0"}
    expected = {
        "gpu/used_share": 0.75,
        "gpu/memory_used_bytes": 2.0**30,
        "gpu/memory_total_bytes": 2.0**36,
        "gpu/temperature_celsius": 40.0,
        "gpu/power_watts": 350.5,
        "gpu/sm_clock_hertz": 1.98e9,
        "gpu/memory_clock_hertz": 2.619e9,
    }
    assert of_first == expected
    assert {name for part, name in found if part == "gpu 1"} == set(of_first) - {"gpu/power_watts"}
    nvml.is_lost = True
    lost = {(one.part, one.name) for one in node.read() if one.part}
    assert set(found) - lost == {("gpu 0", "gpu/used_share")}


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    assert [one for one in NodeMeters(tmp_path).read() if one.part] == []


def test_every_meter_is_in_the_reference():
    page = (Path(__file__).parents[3] / "docs/reference/meters.md").read_text()
    missing = [name for name in (*NODE_METERS, *SERVER_METERS) if f"`{name}`" not in page]
    assert missing == []
