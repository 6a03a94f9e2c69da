"""A worker may send any bytes: they cost its rollouts at most, and are shown as text."""

import asyncio
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_cases import WireInThisProcess, request

from telescope_core.base.terminal import acts_on_terminals
from telescope_core.chat.trouble import showing_troubles
from telescope_core.errors import ContradictionError, EnvironmentProcessError, TelescopeError
from telescope_core.processes import EnvironmentPool, ProcessSettings
from telescope_core.processes.frames import (
    Beat,
    Describe,
    HostFrame,
    Open,
    Play,
    Reply,
    ScoreGroup,
    Welcome,
    as_raw,
    to_bytes,
)
from telescope_core.processes.handshake import Identity
from telescope_core.scripted import ScriptedClient
from telescope_core.types import (
    EnvironmentDescription,
    Group,
    MetricRange,
    Rollout,
    RolloutStatus,
    Split,
    StopReason,
    TurnInfo,
)
from telescope_train.simulation.virtual_time import run_in_virtual_time

PLAYED = Rollout(environment="toy", example_id="x", group_id="g0", index=0, reward=1.0)
WELCOME = Welcome(
    protocol=1,
    core_version="1",
    environment="toy",
    environment_version="1",
    pid=7,
    secrets=(),
    has_group_rewards=True,
)
_HOST: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(HostFrame)
Answer = Callable[[Any], bytes | None]


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def reply(number: int, value: object) -> bytes:
    return to_bytes(Reply(id=number, value=as_raw(value)))


class HostileWire(asyncio.Transport):
    """A place and its connection: greets and opens as it should, then sends what it is told to."""

    label, token, gets_secrets = "a hostile worker", "", False

    def __init__(self, answer: Answer, kind: type[Any]) -> None:
        super().__init__()
        self.answer, self.kind = answer, kind
        self.is_closed = False
        self.greetings: Iterator[Welcome] = itertools.repeat(WELCOME)
        self.opened: list[dict[str, str]] = []
        """The secrets that each worker got."""

    async def start(self, protocol: Any, *, silence_s: float) -> "HostileWire":
        worker = HostileWire(self.answer, self.kind)
        worker.greetings, worker.opened = self.greetings, self.opened
        worker.protocol = protocol
        protocol.connection_made(worker)
        return worker

    def write(self, data: bytes) -> None:
        while data:
            (length,) = struct.unpack(">I", data[:4])
            frame, data = _HOST.decode(data[4 : 4 + length]), data[4 + length :]
            number = getattr(frame, "id", None)
            if number is None:
                sent: bytes | None = to_bytes(next(self.greetings))
            elif isinstance(frame, Open) and self.kind is not Open:
                self.opened.append(frame.secrets)
                sent = reply(number, None)
            elif isinstance(frame, self.kind):
                sent = self.answer(frame)
            else:
                sent = reply(number, None)
            if sent is not None:
                asyncio.get_running_loop().call_soon(self.protocol.data_received, sent)

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    async def end(self, *, within_s: float) -> None:
        self.abort()

    def kill(self) -> None:
        self.abort()

    def hide(self, values: Any) -> None:
        self.hidden = set(values)

    async def epitaph(self) -> str:
        return "it is in this process"


def pool_of(answer: Answer, kind: type[Any] = Play, **changes: Any) -> EnvironmentPool:
    return EnvironmentPool(
        "toy",
        [HostileWire(answer, kind)],
        {},
        identity=Identity(name="toy", version="1"),
        processes=ProcessSettings(**{"max_restarts": 0, **changes}),
    )


async def played(answer: Answer) -> Rollout:
    pool = pool_of(answer)
    try:
        async with asyncio.timeout(600):
            return await pool.play(request(deadline_s=1.0), ScriptedClient(["0"]).policy("r"))
    finally:
        await pool.close()


def in_parts(value: Any) -> dict[str, Any]:
    return msgspec.msgpack.decode(as_raw(value))


NESTED = b"\x91" * 5000 + b"\xc0"
FIELDS: dict[str, Any] = {
    "reward": float("nan"),
    "score_s": -1.0,
    "rewards": {"r": float("inf")},
    "metrics": {"m": float("nan")},
    "status": "cancelled",
    "attempt": "many",
    "info": [{"turn": -1, "key": "k", "value": "v", "kind": "text"}],
    "turns": [{"completion": {"message": {"role": "assistant", "content": ""}}}],
}


@pytest.mark.parametrize("field", FIELDS)
async def test_a_rollout_that_cannot_be_is_a_failed_one_that_names_its_environment(field):
    value = {**in_parts(PLAYED), field: FIELDS[field]}
    rollout = await played(lambda frame: reply(frame.id, value))
    assert (rollout.status, rollout.status_reason) == (RolloutStatus.FAILED, "UnreadableReplyError")
    assert "toy" in rollout.error
    assert "cannot be read" in rollout.error
    assert (rollout.group_id, rollout.index, rollout.reward) == ("g0", 0, None)


async def test_a_worker_with_an_unreadable_reply_is_replaced_and_not_counted_as_dead():
    values = iter(["text", "text", "text", PLAYED])
    pool = pool_of(lambda frame: reply(frame.id, next(values)))
    policy = ScriptedClient(["0"]).policy("r")
    for _ in range(3):
        assert (await pool.play(request(), policy)).status is RolloutStatus.FAILED
    assert (await pool.play(request(), policy)).reward == 1.0
    assert pool.stats()["restarts"] == 3
    await pool.close()


async def test_deep_nesting_and_bytes_that_are_no_text_fail_one_rollout():
    for body in (NESTED, b"\xa2\xff\xfe", b"\xc1"):
        head = msgspec.msgpack.encode(["reply", 1])[1:]
        sent = framed(b"\x93" + head + body)
        rollout = await played(lambda _, sent=sent: sent)
        assert rollout.status is RolloutStatus.FAILED


async def test_a_group_keeps_what_the_host_knows_of_its_rollouts():
    own = replace(PLAYED, error=None, tags={"mine": "1"})
    group = Group(id="g0", environment="toy", example_id="x", rollouts=(own,))
    told = replace(
        own, reward=2.0, group_id="other", status_reason="made up", stop_reason=StopReason.LENGTH
    )
    pool = pool_of(lambda f: reply(f.id, replace(group, id="o", rollouts=(told,))), ScoreGroup)
    scored = await pool.score_group(Split.TRAIN, 0, group)
    assert scored == replace(group, rollouts=(replace(own, reward=2.0),))
    for rollouts in ((), (own, own), (replace(own, index=5),), (replace(own, reward=math.nan),)):
        bad = replace(group, rollouts=rollouts)
        other = pool_of(lambda frame, bad=bad: reply(frame.id, bad), ScoreGroup)
        with pytest.raises(EnvironmentProcessError, match="scoregroup that cannot be read"):
            await other.score_group(Split.TRAIN, 0, group)
        await other.close()
    await pool.close()


async def test_texts_of_a_worker_are_cut_and_escaped_before_they_are_shown():
    wild = "\x1b]0;title\x07\x1b[2J\nrun finished\r" * 100_000
    beat = Beat(trouble=wild)
    failed = replace(
        PLAYED, status=RolloutStatus.FAILED, reward=None, error=wild, status_reason=wild
    )
    lines: list[str] = []
    with showing_troubles(lines.append):
        rollout = await played(lambda frame: to_bytes(beat) + reply(frame.id, failed))
    assert len(lines) == 1
    for text, most in ((lines[0], 4000), (rollout.error, 60_000), (rollout.status_reason, 2000)):
        assert 0 < len(text) < most
        assert not acts_on_terminals(text.replace("\n", ""))
    assert "\n" not in lines[0]


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["reply", "failure", "beat", "complete", "stopped", "scoring", "welcome"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
NOTES = (TurnInfo(turn=0, key="k", value="v"),)
CHANGED = st.dictionaries(st.sampled_from(sorted(asdict(PLAYED))), ANY, max_size=3).map(
    lambda changes: {**in_parts(replace(PLAYED, info=NOTES)), **changes}
)
FRAMES = st.one_of(
    st.binary(max_size=40),
    ANY.map(lambda value: framed(msgspec.msgpack.encode(value))),
    st.lists(ANY, max_size=9).map(lambda rest: framed(msgspec.msgpack.encode(["beat", *rest]))),
    st.tuples(st.sampled_from(["reply", "failure", "stopped", "complete"]), st.lists(ANY)).map(
        lambda parts: framed(msgspec.msgpack.encode([parts[0], 1, *parts[1]]))
    ),
    CHANGED.map(lambda value: framed(msgspec.msgpack.encode(["reply", 1, value]))),
)


@pytest.mark.slow
@settings(max_examples=120)
@given(frames=st.lists(FRAMES, min_size=1, max_size=4))
def test_no_bytes_of_a_worker_raise_more_than_the_failure_of_its_rollout(frames):
    async def play() -> Rollout:
        # What is left unanswered ends with the connection.
        answer = b"".join(frames) + framed(b"\xc1")
        return await played(lambda _: answer)

    with showing_troubles(lambda line: None):
        rollout = run_in_virtual_time(play)
    assert (rollout.environment, rollout.group_id, rollout.index) == ("toy", "g0", 0)
    assert (rollout.reward is None) == (rollout.status is RolloutStatus.FAILED)
    numbers = [*rollout.rewards.values(), *rollout.metrics.values(), rollout.score_s]
    assert all(math.isfinite(number) for number in numbers)
    assert not acts_on_terminals((rollout.error or "").replace("\n", "").replace("\t", ""))


@pytest.mark.slow
@settings(max_examples=25)
@given(value=ANY)
@pytest.mark.parametrize("what", ["describe", "example", "gold", "score_group"])
def test_no_answer_of_a_worker_raises_anything_but_an_error_of_telescope(what, value):
    group = Group(id="g0", environment="toy", example_id="x", rollouts=(PLAYED,))
    asked = {
        "describe": lambda pool: pool.describe(),
        "example": lambda pool: pool.example(Split.TRAIN, 0),
        "gold": lambda pool: pool.gold(Split.TRAIN, 0),
        "score_group": lambda pool: pool.score_group(Split.TRAIN, 0, group),
    }[what]

    async def ask() -> object:
        pool = pool_of(lambda frame: reply(frame.id, value), _NotOpen)
        try:
            async with asyncio.timeout(600):
                return await asked(pool)
        finally:
            await pool.close()

    try:
        run_in_virtual_time(ask)
    except TelescopeError as error:
        assert "cannot be read" in str(error)  # noqa: PT017 (some values are answers)


def greeting(*names: str, **changes: Any) -> Welcome:
    return msgspec.structs.replace(WELCOME, secrets=names, **changes)


def greeted_by(
    *greetings: Welcome, recorded: Sequence[str] | None
) -> tuple[EnvironmentPool, HostileWire, list[tuple[str, ...]]]:
    """Return a pool whose workers greet like that one after another, and each have one rollout."""
    wire = HostileWire(lambda frame: None, Play)
    wire.gets_secrets = True
    wire.greetings = iter(greetings)
    pool = EnvironmentPool(
        "acme/toy",
        [wire],
        {},
        identity=Identity(name="acme/toy", version="1"),
        processes=ProcessSettings(max_restarts=3),
        secrets=recorded,
    )
    told: list[tuple[str, ...]] = []
    pool.tell_secrets(told.append)
    return pool, wire, told


@pytest.fixture
def _set_secrets(monkeypatch):
    for name in ("AGREED_KEY", "OTHER_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, f"value of {name}")


AGREED = {"AGREED_KEY": "value of AGREED_KEY"}


@pytest.mark.usefixtures("_set_secrets")
async def test_a_worker_gets_what_its_record_names_and_it_asks_for_and_is_set():
    names = ("AGREED_KEY", "OTHER_KEY", "UNSET_KEY")
    pool, wire, told = greeted_by(greeting("AGREED_KEY", "UNSET_KEY"), recorded=names)
    await pool.health()
    assert wire.opened == [AGREED]
    assert told == [names], "before any of its code ran"
    await pool.close()


@pytest.mark.usefixtures("_set_secrets")
@pytest.mark.parametrize("recorded", [(), ("AGREED_KEY",)])
async def test_a_greeting_that_asks_for_more_than_the_record_ends_the_start(recorded):
    pool, wire, told = greeted_by(greeting("AGREED_KEY", "DB_PASSWORD"), recorded=recorded)
    with pytest.raises(ContradictionError) as refused:
        await pool.play(request(), ScriptedClient(["0"]).policy("r"))
    assert all(one in str(refused.value) for one in ("DB_PASSWORD", "acme/toy", "1"))
    assert "value of" not in str(refused.value)
    assert wire.opened == []
    assert told == [recorded] * bool(recorded)
    await pool.close()


@pytest.mark.usefixtures("_set_secrets")
async def test_without_a_record_the_names_of_the_first_greeting_are_told_before_the_values():
    pool, wire, told = greeted_by(greeting("AGREED_KEY"), recorded=None)
    at_telling: list[int] = []
    pool.tell_secrets(lambda names: (told.append(names), at_telling.append(len(wire.opened))))
    await pool.health()
    assert (told, at_telling, wire.opened) == ([("AGREED_KEY",)], [0], [AGREED])
    assert pool.secrets == ("AGREED_KEY",)
    await pool.close()


@pytest.mark.slow
@pytest.mark.usefixtures("_set_secrets")
@pytest.mark.parametrize("recorded", [None, ("AGREED_KEY", "OTHER_KEY")])
async def test_a_worker_that_takes_the_place_of_another_gets_no_more_than_that_one(recorded):
    second = greeting("AGREED_KEY", "OTHER_KEY")
    pool, wire, _ = greeted_by(greeting("AGREED_KEY"), second, recorded=recorded)
    await pool.health()
    pool._seats[0].worker.kill("was killed")
    with pytest.raises(ContradictionError, match="OTHER_KEY"):
        await pool.health()
    assert wire.opened == [AGREED]
    await pool.close()


@pytest.mark.usefixtures("_set_secrets")
async def test_a_later_pool_is_held_to_the_names_of_an_earlier_one():
    pool, wire, told = greeted_by(greeting("DB_PASSWORD"), recorded=None)
    pool.agreement.settle(("AGREED_KEY",))
    with pytest.raises(ContradictionError, match="DB_PASSWORD"):
        await pool.health()
    assert (wire.opened, told) == ([], [])
    await pool.close()


@pytest.mark.usefixtures("_set_secrets")
async def test_a_description_that_names_more_ends_the_start(wire):
    pool = wire("Secretive")
    pool.agreement.settle(())
    with pytest.raises(ContradictionError, match="DB_PASSWORD"):
        await pool.describe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fact"),
    [({"environment_version": "2\x1b[2J"}, "version 2"), ({"has_group_rewards": False}, "group")],
)
async def test_a_greeting_that_contradicts_what_is_known_ends_the_start(changes, fact):
    pool, _, _ = greeted_by(greeting(), greeting(**changes), recorded=())
    await pool.health()
    pool._seats[0].worker.kill("was killed")
    with pytest.raises(ContradictionError, match=fact) as refused:
        await pool.health()
    assert not acts_on_terminals(str(refused.value))
    await pool.close()


class _Others(type):
    def __instancecheck__(cls, frame: object) -> bool:
        return not isinstance(frame, Open)


class _NotOpen(metaclass=_Others):
    """Every request but the first."""


async def test_a_worker_that_says_a_thousand_lines_is_shown_one():
    fields = {"lag_s": 0.0, "blocked_s": 0.0, "blocked_call": -1, "memory_bytes": 0}
    beats = b"".join(
        to_bytes(Beat(**fields, blocked_where="", num_stuck_threads=0, trouble=f"line {number}"))
        for number in range(1000)
    )
    lines: list[str] = []
    with showing_troubles(lines.append):
        rollout = await played(lambda frame: beats + reply(frame.id, PLAYED))
    assert rollout.reward == 1.0
    assert len(lines) == 1
    assert lines[0].endswith("line 0")


async def test_what_a_worker_describes_is_text():
    wild = "x\x1b]0;owned\x07" * 1000
    described = EnvironmentDescription(
        name=wild,
        version="1",
        reward_min=0.0,
        reward_max=1.0,
        success_threshold=1.0,
        num_examples={Split.TRAIN: 1},
        network="none",
        metrics={wild: MetricRange()},
        dataset_revisions={wild: wild},
        reward_weights={wild: 1.0},
        has_group_rewards=True,
    )
    pool = pool_of(lambda frame: reply(frame.id, described), Describe)
    found = await pool.describe()
    ((repo, revision),) = found.dataset_revisions.items()
    for text in (found.name, *found.metrics, *found.reward_weights, repo, revision):
        assert 0 < len(text) < 2000
        assert not acts_on_terminals(text)
    await pool.close()


async def test_a_request_is_not_given_up_for_the_code_of_rollouts_beside_it():
    """Their code ends one worker after another, which says nothing of a group's score."""
    is_asked, may_answer = asyncio.Event(), False

    def answer(frame):
        if isinstance(frame, Play):
            fields = {"lag_s": 0.0, "blocked_s": 0.0, "blocked_call": -1, "memory_bytes": 0}
            beat = Beat(**fields, blocked_where="r", num_stuck_threads=0, ended_by=frame.id)
            return to_bytes(beat) + framed(b"\xc1")
        if not isinstance(frame, ScoreGroup):
            return reply(frame.id, None)
        is_asked.set()
        return reply(frame.id, group) if may_answer else None

    group = Group(id="g0", environment="toy", example_id="x", rollouts=(PLAYED,))
    pool = pool_of(answer, _NotOpen)
    scored = asyncio.create_task(pool.score_group(Split.TRAIN, 0, group))
    async with asyncio.timeout(60):
        for number in range(5):
            await is_asked.wait()
            is_asked.clear()
            may_answer = number == 4
            rollout = await pool.play(request(), ScriptedClient(["0"]).policy("r"))
            assert rollout.status_reason == "RolloutCrashError"
        assert await scored == group
    await pool.close()


async def test_a_worker_cannot_say_that_another_was_the_reason():
    """It would be played again without an end."""
    told = replace(
        PLAYED,
        status=RolloutStatus.FAILED,
        reward=None,
        status_reason="EnvironmentProcessError",
        tags={"lost_to": "g7/0", "mine\x1b[2J": "1\x07"},
    )
    rollout = await played(lambda frame: reply(frame.id, told))
    assert not rollout.is_innocent
    assert [acts_on_terminals(one) for one in (*rollout.tags, *rollout.tags.values())] == [
        False
    ] * 2


async def test_the_honest_rollouts_of_other_workers_go_on(wire):
    hostile = HostileWire(lambda _: framed(b"\xc1"), Play)
    honest = WireInThisProcess("worker_toys:Echo")
    pool = EnvironmentPool(
        "toy",
        [hostile, honest],
        {},
        identity=Identity(name="toy", version="1"),
        processes=ProcessSettings(num_workers=2, max_restarts=0),
    )
    await pool.health()
    async with asyncio.timeout(60):
        while pool.stats()["workers"] < 2:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)
    rollouts = await asyncio.gather(
        *(
            pool.play(request(0, rollout=index), ScriptedClient(["0"]).policy("r"))
            for index in range(8)
        )
    )
    kept = [one for one in rollouts if one.status is RolloutStatus.KEPT]
    assert len(kept) == 4
    assert all("malformed" in one.error for one in rollouts if one not in kept)
    await pool.close()
