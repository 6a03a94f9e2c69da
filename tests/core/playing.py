"""The smallest environment there is, and one rollout of any, in this process."""

from tests.asking import ask

from telescope_core import Example, ListSource, SingleTurnEnvironment
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient


class One(SingleTurnEnvironment):
    """One example, whose answer is yes."""

    def examples(self, split):
        return ListSource([Example(id="one", prompt="yes?", answer="yes")])


async def play(environment, replies=("yes",), *, index: int = 0, deadline_s: float = 10.0):
    client = InProcessEnvironment(environment, name="it")
    try:
        policy = ScriptedClient(list(replies)).policy("r")
        return await client.play(ask(example_index=index, deadline_s=deadline_s), policy)
    finally:
        await client.close()
