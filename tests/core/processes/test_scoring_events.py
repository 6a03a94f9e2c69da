"""A host hears when a rollout begins to be scored; sides of an earlier version stay undisturbed."""

import asyncio

import msgspec
import pytest
from wire_cases import WireInThisProcess, request

from telescope_core.base.scoring_events import hearing_of_scoring
from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.processes.frames import LENGTH_BYTES, HostFrame, Play, to_bytes
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import ChatEndpoint, RolloutStatus


def scripted():
    return ScriptedClient(["0"]).policy("r")


class Events(list[str]):
    """What was heard, in order."""

    def listener(self, rollout_id: str):
        return lambda: self.append(rollout_id)


@pytest.mark.parametrize("is_far", [False, True])
async def test_scoring_is_told_of_each_rollout_for_itself(wire, is_far: bool):
    environment = load_environment_class("worker_toys:Echo").from_settings({})
    client = wire() if is_far else InProcessEnvironment(environment, name="toy", version="1")
    events = Events()

    async def play(index: int):
        wanted = request(index)
        with hearing_of_scoring(events.listener(wanted.rollout_id)):
            return await client.play(wanted, scripted())

    rollouts = await asyncio.gather(*(play(index) for index in range(3)))
    assert [one.status for one in rollouts] == [RolloutStatus.KEPT] * 3
    assert sorted(events) == ["g0/0", "g1/0", "g2/0"]
    assert (await client.play(request(4), scripted())).reward is not None, "nobody listens"
    assert len(events) == 3


async def test_scoring_is_told_when_it_begins(wire):
    """Example 1 is scored without end, so that only the event can arrive."""
    pool = wire("EndlessScore")
    heard = asyncio.Event()

    async def play():
        with hearing_of_scoring(heard.set):
            return await pool.play(request(1), scripted())

    playing = asyncio.create_task(play())
    async with asyncio.timeout(60):
        await heard.wait()
    assert not playing.done()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.slow
async def test_a_rollout_that_is_never_scored_is_not_told_as_scored(wire):
    pool, events = wire("Hangs"), Events()
    with hearing_of_scoring(events.listener("x")):
        failed = await pool.play(request(1, deadline_s=0.2), scripted())
    assert failed.status is RolloutStatus.FAILED
    assert events == []


async def test_a_host_that_did_not_ask_gets_no_frame_that_it_may_not_know(wire):
    place = WireInThisProcess("worker_toys:Echo")
    pool = wire(place=place)
    await pool.describe()
    (serving,) = place.servings
    sent: list[str] = []
    send = serving.connection.send

    def noting(frame) -> None:
        sent.append(type(frame).__name__)
        send(frame)

    serving.connection.send = noting
    await pool.play(request(1), scripted())
    assert "Scoring" not in sent
    with hearing_of_scoring(lambda: None):
        await pool.play(request(1), scripted())
    assert sent.count("Scoring") == 1


class EarlierPlay(msgspec.Struct, array_like=True, tag="play", kw_only=True):
    """The frame as it was before hosts could ask for events."""

    request: PlayRequest
    endpoint: ChatEndpoint | None
    id: int = -1


def test_frames_of_both_versions_are_understood_by_both():
    now = Play(request=request(1), endpoint=None, id=3, tells_scoring=True)
    body = to_bytes(now)[LENGTH_BYTES:]
    assert msgspec.msgpack.decode(body, type=EarlierPlay).id == 3
    before = msgspec.msgpack.encode(EarlierPlay(request=request(1), endpoint=None, id=4))
    read = msgspec.msgpack.decode(before, type=HostFrame)
    assert isinstance(read, Play)
    assert (read.id, read.tells_scoring) == (4, False)
