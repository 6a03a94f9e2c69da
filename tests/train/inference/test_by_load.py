"""The server with the most room is found as if all were looked at, and calls are bounded."""

import asyncio
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.records.servers import ServerState
from telescope_train.inference.servers import (
    MOST_AT_ONCE,
    ByLoad,
    ControlCall,
    Server,
    call_servers,
)
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.servers import ServerTimes, SimulatedClient, call_in_step
from telescope_train.simulation.virtual_time import run_in_virtual_time

TIMES = ServerTimes(round_trip_s=0.002, transfer_s=0.5)


def clients(count: int) -> list[SimulatedClient]:
    return [
        SimulatedClient(SimulatedEngine(EngineSpeed(), name=f"server-{n}"), TIMES)
        for n in range(count)
    ]


def slow_least(servers: list[Server]) -> Server | None:
    serving = [one for one in servers if one.takes_requests]
    return min(
        serving,
        key=lambda one: (Fraction(one.num_in_slots, one.most_in_slots), one.num_requests),
        default=None,
    )


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("sendlosebackroom"), st.integers(0, 6)), max_size=300),
    st.booleans(),
)
def test_the_least_loaded_is_found_whatever_happens(
    events: list[tuple[str, int]], in_slots: bool
) -> None:
    async def main() -> None:
        servers = [Server(client) for client in clients(7)]
        by_load = ByLoad(servers)
        sent: list[Server] = []
        for kind, number in events:
            server = servers[number]
            if kind in "send" and (least := by_load.least()) is not None:
                assert least is slow_least(servers)
                by_load.add(least, 1, in_slots=in_slots)
                sent.append(least)
            elif kind in "lo" and sent:
                by_load.add(sent.pop(number % len(sent)), -1, in_slots=in_slots)
            elif kind in "rm":
                server.most_in_slots = 1 + 3 * number
                by_load.add(server)
            elif kind in "ba" and server.takes_requests:
                server.become(ServerState.LOST)
            elif server.state is ServerState.LOST:
                server.become(ServerState.STARTING)
                server.become(ServerState.LOADING)
                server.become(ServerState.SERVING)
                by_load.add(server)
        assert by_load.least() is slow_least(servers)

    run_in_virtual_time(main)


def test_what_is_remembered_does_not_grow_with_the_requests() -> None:
    async def main() -> int:
        servers = [Server(client) for client in clients(3)]
        by_load = ByLoad(servers)
        for _ in range(2000):
            for change in (1, 1, -1, -1):
                by_load.add(servers[2], change)
        return len(by_load._entries)

    assert run_in_virtual_time(main) < 100


@pytest.mark.parametrize("is_collective", [False, True])
def test_many_servers_are_called_a_part_at_a_time_unless_all_must_take_part(
    is_collective: bool,
) -> None:
    most = now = 0

    class Counting(SimulatedClient):
        async def control(self, path: str, body: Any = None, **options: Any) -> Any:
            nonlocal most, now
            now += 1
            most = max(most, now)
            answer = await super().control(path, body, **options)
            now -= 1
            return answer

    async def main() -> list[int]:
        counting = [Counting(one.engine, TIMES) for one in clients(MOST_AT_ONCE + 44)]
        heard: list[int] = []
        call = ControlCall(path="/start_weight_update", is_collective=is_collective)
        await call_servers(counting, call, lambda number, answer: heard.append(number))
        return heard

    heard = run_in_virtual_time(main)
    assert sorted(heard) == list(range(MOST_AT_ONCE + 44))
    assert most == (len(heard) if is_collective else MOST_AT_ONCE)


@pytest.mark.parametrize("path", ["/pause", "/start_weight_update", "/update_weights", "/resume"])
def test_servers_that_are_called_in_step_notice_the_same_at_the_same_times(path: str) -> None:
    def heard(call: Any) -> list[tuple[int, str, float]]:
        async def main() -> list[tuple[int, str, float]]:
            clock = asyncio.get_running_loop()
            called = clients(MOST_AT_ONCE + 44)
            called[3].engine.die("killed before")
            clock.call_later(0.0025, called[4].engine.die, "killed in between")
            clock.call_later(0.0025, called[-1].engine.die, "killed in between")
            found: list[tuple[int, str, float]] = []
            is_collective = path == "/update_weights"
            await call(
                called,
                ControlCall(path=path, query="?mode=keep", is_collective=is_collective),
                lambda number, answer: found.append((number, repr(answer), clock.time())),
            )
            return sorted(found)

        return run_in_virtual_time(main)

    assert heard(call_in_step) == heard(call_servers)
