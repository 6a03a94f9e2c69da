"""Metrics, meters and servers of a run, for Prometheus to scrape.

It shows the newest values: the metrics of the last step, the last reading of each meter (nothing if
its machine or server did not answer), and for each eval the last point that has a result.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from telescope_core.base.addresses import in_url
from telescope_core.base.errors import ConfigError
from telescope_core.records.timeline import GaugeSample
from telescope_train.observability.eval_numbers import step_numbers

_PREFIX = "telescope_"
_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStanding:
    """The state of one inference server."""

    address: str
    is_serving: bool
    version: int
    """Version of its present weights."""
    life: int
    """Number of its start: 1 for the first, and one more after each loss."""


class PrometheusEndpoint:
    """Answers scrapes in its own thread. Use it as a context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        environments: Sequence[str],
    ) -> None:
        """`environments`: names that become a label. `port` 0 = a free one."""
        self._host, self._port = host, port
        # The longest first: one name may be a part of another.
        self._environments = sorted(environments, key=len, reverse=True)
        self.servers: Callable[[], Sequence[ServerStanding]] = tuple
        """Returns the inference servers; set once there are any."""
        self._meters: dict[str, Sequence[GaugeSample]] = {}
        """Readings by machine or server."""
        self._row: dict[str, float] = {}
        self._evals: dict[str, Mapping[str, float]] = {}
        self._holding = Lock()
        self._server: Any = None

    @property
    def address(self) -> str:
        """Address for Prometheus."""
        return f"http://{in_url(self._host)}:{self._port}/metrics"

    def __enter__(self) -> "PrometheusEndpoint":
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise ConfigError(
                f"expected a free port {self._port} at {self._host} for Prometheus: "
                f"{error.strerror}; set prometheus_port to another one, or to 0 for any"
            ) from None
        self._port = self._server.server_port
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def meters(self, source: str, samples: Sequence[GaugeSample]) -> None:
        """Replace the readings of a machine or a server; no readings = it has gone."""
        with self._holding:
            self._meters.pop(source, None)
            if samples:
                self._meters[source] = tuple(samples)

    def eval_point(self, name: str, numbers: Mapping[str, float]) -> None:
        """Replace the numbers of the previous eval by those of a new one."""
        with self._holding:
            self._evals[name] = dict(numbers)

    def row(self, row: Mapping[str, Any]) -> None:
        """Replace the metrics of the previous step by those of a new one."""
        numbers = step_numbers(row)
        with self._holding:
            self._row = numbers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics; `prometheus_client` calls it for each scrape."""
        with self._holding:
            meters = [one for samples in self._meters.values() for one in samples]
            row, evals = dict(self._row), dict(self._evals)
        families: dict[str, GaugeMetricFamily] = {}

        def add(name: str, help_text: str, labels: dict[str, str], value: float) -> None:
            family = families.get(name)
            if family is None:
                family = families[name] = GaugeMetricFamily(name, help_text, labels=list(labels))
            family.add_metric(list(labels.values()), value)

        for key, value in row.items():
            name, environment = self._parts(key)
            add(_metric(name), f"{name} of the last step", {"environment": environment}, value)
        for name, numbers in evals.items():
            for key, value in numbers.items():
                add(_metric(f"eval/{key}"), f"{key} of the last eval", {"eval": name}, value)
        for one in meters:
            label = {"source": one.source}
            add(f"{_metric(one.name)}_meter", f"{one.name}, last reading", label, one.value)
        for one in self.servers():
            label = {"server": one.address}
            add(f"{_PREFIX}server_serving", "1 = it samples", label, float(one.is_serving))
            add(f"{_PREFIX}server_version", "weights that it holds", label, float(one.version))
            add(f"{_PREFIX}server_lives", "times that it was started", label, float(one.life))
        yield from families.values()

    def _parts(self, key: str) -> tuple[str, str]:
        """Return the metric and the environment in `key`; empty = all of them."""
        for name in self._environments:
            before, found, after = f"/{key}/".partition(f"/{name}/")
            if found:
                return f"{before}/{after}".strip("/"), name
        return key, ""


def _metric(name: str) -> str:
    return _PREFIX + _FORBIDDEN.sub("_", name).strip("_")
