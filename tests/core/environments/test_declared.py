"""What an environment says of its conversations before it is played, as far as that is known."""

import msgspec
import pytest

from telescope_core.environments import (
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.in_process import InProcessEnvironment
from telescope_core.types import EnvironmentDescription


class Scored:
    data = tuple(f"{number}+2=" for number in range(20))

    @reward
    def one(self, completion):
        return 1.0


class Single(Scored, SingleTurnEnvironment):
    """Answers once."""


class Told(Single):
    system_prompt = "Add."


class Opens(Told):
    def opening(self, prompt):
        return super().opening(prompt)[1:]


class Plays(Told):
    async def play(self, episode):
        await episode.generate()


class Multi(Scored, MultiTurnEnvironment):
    def env_response(self, messages, episode):
        return None


class Once(Multi):
    max_turns = 1


class Tools(Scored, ToolEnvironment):
    @tool
    def add(self, a: int) -> int:
        """Add a number."""
        return a


class ToldTools(Tools):
    system_prompt = "Add."


class Replies(Tools):
    async def env_response(self, messages, episode):
        return await super().env_response(messages, episode)


NATIVE = {"tool_call_format": "native"}
XML = {"tool_call_format": "xml"}


@pytest.mark.parametrize(
    ("cls", "settings", "sends_system", "goes_on", "max_turns"),
    [
        (Single, {}, False, False, 1),
        (Told, {}, True, False, 1),
        (Opens, {}, False, False, 1),
        (Plays, {}, True, None, None),
        (Multi, {}, False, True, 10),
        (Once, {}, False, False, 1),
        (Tools, NATIVE, False, False, 10),
        (Tools, XML, True, True, 10),
        (ToldTools, NATIVE, True, False, 10),
        (Replies, NATIVE, False, None, None),
    ],
)
async def test_what_is_known_of_its_conversations(cls, settings, sends_system, goes_on, max_turns):
    client = InProcessEnvironment(cls.from_settings(settings), name="x")
    described = await client.describe()
    await client.close()
    assert (described.sends_system, described.goes_on) == (sends_system, goes_on)
    assert described.max_turns == max_turns


async def test_an_older_worker_declares_none_of_it():
    client = InProcessEnvironment(Told.from_settings({}), name="x")
    sent = msgspec.to_builtins(await client.describe())
    await client.close()
    del sent["sends_system"], sent["goes_on"], sent["max_turns"]
    read = msgspec.convert(sent, EnvironmentDescription)
    assert (read.sends_system, read.goes_on, read.system_prompt) == (None, None, "Add.")
    assert read.max_turns is None
