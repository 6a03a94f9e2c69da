"""Prefetch: what is ready before its turn, how far ahead, and that it changes nothing else."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.train.rollouts.samplers import GROUPS, Echo, echo, sampler_over

from telescope_core import Message, TelescopeError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_train.rollouts.draw import Drawn, ExampleDraw, Source
from telescope_train.rollouts.prefetch import Prefetch, first_messages

ENDLESS = Source(environment="echo", weight=1.0, num_examples=None)


def new_draw() -> ExampleDraw:
    return ExampleDraw([ENDLESS], seed=0)


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
    prefetch = Prefetch(
        new_draw(), asked, lambda messages: prepared.append(messages[0].content), size=5
    )
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
    prefetch = Prefetch(
        new_draw(), asked, lambda messages: prepared.append(messages[0].content), size=3
    )
    prefetch.keep_ahead_of(0)
    await settled()
    assert asked.numbers == [1, 2, 3]
    assert len(prepared) == 2
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
