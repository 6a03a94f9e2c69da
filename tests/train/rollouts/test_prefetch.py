"""Prefetch: what is ready before its turn, how far ahead, and that it changes nothing else."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.train.rollouts.samplers import GROUPS, Echo, echo, sampler_over

from telescope_core import Message, TelescopeError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_train.rollouts.draw import Drawn, ExampleDraw, Source
from telescope_train.rollouts.prefetch import READERS, Prefetch, Prepare, first_messages

ENDLESS = Source(environment="echo", weight=1.0, num_examples=None)


def new_draw() -> ExampleDraw:
    return ExampleDraw([ENDLESS], seed=0)


def noting(prepared: list[str]) -> Prepare:
    async def prepare(environment: str, messages: Sequence[Message]) -> None:
        prepared.append(messages[0].content)

    return prepare


async def settled() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


class Asked:
    """Stands for an environment: notes which draws were asked for."""

    def __init__(self, *, broken: int | None = None) -> None:
        self.numbers: list[int] = []
        self._broken = broken

    async def __call__(self, drawn: Drawn) -> Sequence[Message]:
        self.numbers.append(drawn.number)
        await asyncio.sleep(0)
        if drawn.number == self._broken:
            raise TelescopeError("no such example")
        return [Message(role="user", content=str(drawn.example_index))]


async def test_as_many_prompts_are_ready_as_asked_for_and_none_twice() -> None:
    asked, prepared = Asked(), list[str]()
    prefetch = Prefetch(new_draw(), asked, noting(prepared), size=5)
    assert asked.numbers == []
    prefetch.keep_ahead_of(0)
    await settled()
    assert asked.numbers == [1, 2, 3, 4, 5]
    prefetch.keep_ahead_of(0)
    prefetch.keep_ahead_of(2)
    await settled()
    assert asked.numbers == [1, 2, 3, 4, 5, 6, 7]
    prefetch.keep_ahead_of(1)
    await settled()
    assert len(asked.numbers) == 7
    draw = new_draw()
    drawn = [draw.next() for _ in range(8)]
    assert prepared == [str(one.example_index) for one in drawn[1:]]
    await prefetch.close()


async def test_what_has_begun_already_is_not_made_ready_any_more() -> None:
    asked = Asked()
    prefetch = Prefetch(new_draw(), asked, None, size=2)
    prefetch.keep_ahead_of(10)
    await settled()
    assert asked.numbers == [11, 12]
    await prefetch.close()


async def test_an_example_that_cannot_be_read_is_left_to_whoever_plays_it() -> None:
    asked, prepared = Asked(broken=2), list[str]()
    prefetch = Prefetch(new_draw(), asked, noting(prepared), size=3)
    prefetch.keep_ahead_of(0)
    await settled()
    assert asked.numbers == [1, 2, 3]
    assert len(prepared) == 2
    await prefetch.close()


@pytest.mark.parametrize("in_reading", [True, False])
async def test_an_unexpected_error_stops_nothing_and_is_in_the_log(
    in_reading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody awaits what is read ahead, so that an error there would be seen by nobody."""
    prepared: list[str] = []

    async def read(drawn: Drawn) -> Sequence[Message]:
        if in_reading and drawn.number == 2:
            raise KeyError("level")
        return [Message(role="user", content=str(drawn.number))]

    async def prepare(environment: str, messages: Sequence[Message]) -> None:
        if not in_reading and messages[0].content == "2":
            raise KeyError("level")
        prepared.append(messages[0].content)

    prefetch = Prefetch(new_draw(), read, prepare, size=4)
    with caplog.at_level("INFO"):
        prefetch.keep_ahead_of(0)
        await settled()
    assert prepared == ["1", "3", "4"]
    assert "was not made ready: KeyError: 'level'" in caplog.text
    assert "whoever plays it reports it" in caplog.text
    await prefetch.close()


class Slow(Asked):
    """Answers one question after the other, when it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, asyncio.Event] = {}

    async def __call__(self, drawn: Drawn) -> Sequence[Message]:
        self.numbers.append(drawn.number)
        self.held[drawn.number] = asyncio.Event()
        await self.held[drawn.number].wait()
        return [Message(role="user", content=str(drawn.number))]


@pytest.mark.parametrize(("size", "at_once"), [(3, 3), (50, READERS)])
async def test_slow_examples_are_read_several_at_a_time(size: int, at_once: int) -> None:
    """One that takes a second each would else be no faster ahead of its turn than at it."""
    slow, prepared = Slow(), list[str]()
    prefetch = Prefetch(new_draw(), slow, noting(prepared), size=size)
    prefetch.keep_ahead_of(0)
    await settled()
    assert slow.numbers == list(range(1, at_once + 1))
    slow.held[2].set()
    await settled()
    assert prepared == ["2"], "one that is ready waits for no other"
    assert len(slow.numbers) == at_once + (size > at_once)
    prefetch.keep_ahead_of(1)
    await settled()
    assert len(slow.numbers) == at_once + 1, "as many as before, and no further"
    closing = asyncio.create_task(prefetch.close())
    await settled()
    assert closing.done()


async def test_what_begins_before_it_was_ready_is_skipped() -> None:
    slow = Slow()
    prefetch = Prefetch(new_draw(), slow, None, size=2)
    prefetch.keep_ahead_of(0)
    await settled()
    prefetch.keep_ahead_of(20)
    for number in (1, 2):
        slow.held[number].set()
    await settled()
    assert slow.numbers == [1, 2, 21, 22], "3 to 20 are played already"
    await prefetch.close()


class Framed(Echo):
    """Begins with a system prompt."""

    system_prompt = "Say what you hear."


@pytest.mark.parametrize("environment", [Echo, Framed])
async def test_the_guess_is_what_the_environment_asks_first(environment: type[Echo]) -> None:
    client = InProcessEnvironment(environment(), name="echo")
    prompts = {"echo": (await client.describe()).system_prompt}
    guess = await first_messages(client, Drawn(environment="echo", example_index=2), prompts)
    policy = ScriptedClient(echo)
    sampler = sampler_over(policy, ahead=0, environment=environment(), groups=GROUPS * 4)
    sampler.advance(0)
    await sampler.take(0)
    await sampler.close()
    assert guess[-1].content == "p2"
    assert tuple(guess) in [tuple(messages) for messages in policy.requests]
