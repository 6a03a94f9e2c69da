"""A start may take any time while the cluster does something; the time is virtual."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telescope_train.cluster import placement
from telescope_train.cluster.nodes import LOOK_EVERY_S, until_started
from telescope_train.cluster.placement import Bundle, Room, RoomRequest
from telescope_train.simulation.virtual_time import run_in_virtual_time

SILENCE_S = 100.0


def started_by(
    start: Callable[[], Awaitable[str]], *, moves_until_s: float = 0.0
) -> tuple[str, float]:
    """Wait for `start` in a cluster that does something until then; returns what came, and when."""

    async def main() -> tuple[str, float]:
        clock = asyncio.get_running_loop()
        try:
            found = await until_started(
                start(), silence_s=SILENCE_S, look=lambda: min(clock.time(), moves_until_s)
            )
        except TimeoutError as error:
            found = str(error)
        return found, clock.time()

    return run_in_virtual_time(main)


async def never() -> str:
    await asyncio.Event().wait()
    return "started"


async def slowly() -> str:
    await asyncio.sleep(950.0)
    return "started"


def test_a_start_takes_any_time_while_something_moves() -> None:
    assert started_by(slowly, moves_until_s=900.0) == ("started", 950.0)


def test_a_start_ends_when_nothing_moves_any_more() -> None:
    for moves_until_s in (0.0, 512.0):
        found, ended_s = started_by(never, moves_until_s=moves_until_s)
        assert found.startswith("the cluster did nothing for the run for 100 s; what it waits for")
        assert moves_until_s + SILENCE_S <= ended_s <= moves_until_s + SILENCE_S + LOOK_EVERY_S


def test_what_a_start_raises_is_raised() -> None:
    async def fails() -> str:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        started_by(fails)


def test_a_wait_for_room_goes_on_as_long_as_nodes_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait of the group is one deadline, in which a node joins until there are three."""
    nodes, waits = ["a"], list[float]()

    def wait(timeout_seconds: float) -> bool:
        waits.append(timeout_seconds)
        nodes.extend([str(len(nodes))] if len(nodes) < 3 else [])
        return len(waits) == num_enough

    group: Any = SimpleNamespace(wait=wait)
    gone: list[Any] = []
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(placement, "remove_placement_group", gone.append)
    monkeypatch.setattr(
        placement, "living_nodes", lambda: [SimpleNamespace(id=one) for one in nodes]
    )
    monkeypatch.setattr(placement, "nodes_text", lambda: ", ".join(nodes))
    asked = RoomRequest("ranks", "trainer_num_workers", [Bundle(cpus=1.0)], "PACK")
    num_enough = 3
    assert placement.reserve(asked, deadline_s=7.0) == Room(group, asked.bundles)
    assert (waits, gone) == ([7.0] * 3, [])
    nodes[1:], waits[:], num_enough = [], [], 4
    with pytest.raises(placement.ConfigError, match=r"no room for 1 ranks .* within 7 s\. It has"):
        placement.reserve(asked, deadline_s=7.0)
    assert (len(waits), gone) == (3, [group])
