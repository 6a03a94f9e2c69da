"""A port that is held cannot be taken by another program before its first listener."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest

from telescope_core.errors import ConfigError
from telescope_train.cluster import ports
from telescope_train.cluster.ports import HeldPort, free_port, listening
from telescope_train.config.fields import decided
from telescope_train.config.schema import TrainConfig


def bind(port: int) -> None:
    """Bind as another program of this machine would."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.bind(("127.0.0.1", port))


def store(port: int, **settings) -> Any:
    from torch.distributed import TCPStore

    deadline = timedelta(seconds=60)
    return TCPStore("127.0.0.1", port, 2, timeout=deadline, wait_for_workers=False, **settings)


def test_nothing_else_can_listen_where_others_were_told_to_meet() -> None:
    held = HeldPort()
    port = held.hold()
    with pytest.raises(OSError, match="in use"):
        bind(port)
    held.close()
    bind(port)


def test_who_comes_before_the_listener_is_heard_by_it() -> None:
    held = HeldPort()
    port = held.hold()
    early = socket.create_connection(("127.0.0.1", port), timeout=60)
    leader = store(port, is_master=True, master_listen_fd=held.hand_over(port))
    with pytest.raises(OSError, match="in use"):
        bind(port)
    member = store(port, is_master=False)
    leader.set("version", "3")
    assert member.get("version") == b"3"
    early.close()


def test_one_port_is_held_at_a_time() -> None:
    held = HeldPort()
    for attempt in range(10):
        first, second = held.hold(), held.hold()
        try:
            bind(first)
        except OSError:
            # A connection of another process may have taken it meanwhile, but not ten times.
            if attempt == 9:
                raise
        else:
            break
    assert held.hand_over(first) is None
    descriptor = held.hand_over(second)
    assert descriptor is not None
    assert held.hand_over(second) is None
    socket.socket(fileno=descriptor).close()


def test_a_free_port_is_none_that_a_connection_could_take_meanwhile() -> None:
    for _ in range(50):
        port = free_port()
        assert 20_000 <= port < 32_000
        bind(port)


def test_where_all_of_those_are_in_use_the_system_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(ports, "_BELOW_CONNECTIONS", (taken, taken + 1))
        port = free_port()
    assert port not in (0, taken)


def test_an_address_of_another_machine_has_no_free_port() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*address"):
        free_port("192.0.2.1")
    assert free_port("127.0.0.1") > 0


def test_a_port_that_was_not_set_may_be_taken() -> None:
    """A server takes a later one then, so two runs can begin side by side without a word."""

    def config_of(**inference: object) -> TrainConfig:
        return TrainConfig.model_validate(
            {
                "run": {"name": "r", "number_of_steps": 1},
                "model": {"model": "m"},
                "environments": [{"name": "a:B"}],
                "inference": inference,
            }
        )

    with listening("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        unset = config_of()
        section = decided(unset.inference, inference_base_port=port)
        assert ports.port_problems(unset.model_copy(update={"inference": section})) == []
        (problem,) = ports.port_problems(config_of(inference_base_port=port))
        assert f"{port}" in problem
        assert f"in use by process {os.getpid()} " in problem
    for host, fact in (("192.0.2.1", "no address"), ("2001:db8::1", "no IPv6 address")):
        (problem,) = ports.port_problems(config_of(inference_host=host))
        assert fact in problem
        assert "inference_host" in problem


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_held_in_both_families(host: str) -> None:
    with listening(host) as first, pytest.raises(OSError, match="in use"):
        listening(host, first.getsockname()[1])
    assert HeldPort().hold(host) > 0


def test_servers_that_start_at_one_moment_never_get_one_port() -> None:
    """Forty pairs of runs, each pair with the same first port."""
    with listening("127.0.0.1") as free:
        first = free.getsockname()[1]
    together = Barrier(2)

    def start(_: int) -> socket.socket:
        together.wait(60)
        return ports.listening_from("127.0.0.1", first, every=1)

    with ThreadPoolExecutor(2) as runs:
        for _ in range(40):
            one, two = runs.map(start, range(2))
            with one, two:
                assert one.getsockname()[1] != two.getsockname()[1]
