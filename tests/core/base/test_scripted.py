"""A scripted policy counts the words of what it is asked, each message only once."""

import pytest

from telescope_core.errors import ConfigError
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Message, Sampling

SAMPLING = Sampling(max_tokens=8)


class Watched(str):
    """A text that notes each time somebody takes it apart."""

    times = 0

    def split(self, *arguments, **options):
        type(self).times += 1
        return super().split(*arguments, **options)


async def test_a_message_is_counted_once_however_long_the_conversation(monkeypatch):
    monkeypatch.setattr(Watched, "times", 0)
    policy = ScriptedClient(["go on"]).policy("r")
    messages = [Message(role="user", content=Watched("one two three"))]
    counted = []
    for _ in range(30):
        completion = await policy.complete(messages, SAMPLING)
        counted.append(completion.num_prompt_tokens)
        messages += [completion.message, Message(role="user", content=Watched("and then"))]
    assert counted == [3 + 4 * turn for turn in range(30)]
    assert Watched.times == 30


async def test_a_conversation_that_was_rewritten_is_counted_as_it_is_now():
    policy = ScriptedClient(["yes"]).policy("r")
    first = Message(role="system", content="be brief")
    long = Message(role="user", content="a b c d")
    short = Message(role="user", content="a")
    counted = [
        (await policy.complete(messages, SAMPLING)).num_prompt_tokens
        for messages in ([first, long], [first, short], [first], [])
    ]
    assert counted == [6, 3, 2, 0]


@pytest.mark.parametrize("replies", ["hello", [5], [Message(role="assistant", content="a")]])
def test_a_script_of_something_else_is_refused(replies):
    with pytest.raises(ConfigError, match="must be a list of texts"):
        ScriptedClient(replies)


async def test_a_script_without_replies_is_for_who_is_never_asked():
    with pytest.raises(ConfigError, match="without replies"):
        await ScriptedClient([]).policy("r").complete([], SAMPLING)
