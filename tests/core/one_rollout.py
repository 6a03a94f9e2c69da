"""The smallest environment there is, one rollout of any in this process, and time that passes."""

import asyncio
from typing import NoReturn

from tests.asking import ask

from telescope_core import Example, ListSource, SingleTurnEnvironment
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient


class One(SingleTurnEnvironment):
    """One example, whose answer is yes."""

    def examples(self, split):
        return ListSource([Example(id="one", prompt="yes?", answer="yes")])


async def play(environment, replies=("yes",), *, index: int = 0, deadline_s: float = 60.0):
    client = InProcessEnvironment(environment, name="it")
    try:
        policy = ScriptedClient(list(replies)).policy("r")
        return await client.play(ask(example_index=index, deadline_s=deadline_s), policy)
    finally:
        await client.close()


def let_time_pass(seconds: float = 61.0) -> None:
    """Move the clock of the running loop on, as if nothing had happened for so long.

    A test of a deadline then neither waits for it nor misses it on a busy machine.
    """
    loop = asyncio.get_running_loop()
    earlier = loop.time
    loop.time = lambda: earlier() + seconds


async def wait_for_ever() -> NoReturn:
    """Never return; what waits for this, waits in vain for longer than deadlines of tests are."""
    let_time_pass()
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")
