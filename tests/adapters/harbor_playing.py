"""Task folders of Harbor opened and played with scripts, in local sandboxes."""

from dataclasses import replace

from tests.asking import ask
from tests.core.harnesses.agents import AGENT, ScriptedPolicy

from telescope_adapters.harbor import HarborEnvironment
from telescope_core import Split
from telescope_core.gateway import Gateway, RecordedEnvironment
from telescope_core.in_process import InProcessEnvironment

HARNESS = {
    "harness": "command",
    "harness_options": {
        "argv": ["python3", "/tmp/agent/agent.py", "{task}"],
        "files": {"/tmp/agent/agent.py": AGENT},
    },
}
LOCAL = {"sandbox": "local", **HARNESS}


def opened(folder, **settings) -> HarborEnvironment:
    return HarborEnvironment.from_settings({"id": str(folder), **LOCAL, **settings})


class playing:
    """Plays rollouts of an environment with scripts, in one gateway."""

    def __init__(self, environment: HarborEnvironment) -> None:
        self.client = RecordedEnvironment(InProcessEnvironment(environment, name="harbor"))
        self.gateway = Gateway(model="policy")

    async def __aenter__(self):
        await self.gateway.start()

        async def play(*replies, index=0):
            policy = ScriptedPolicy(self.gateway, replies)
            asked = replace(ask(deadline_s=300.0), split=Split.EVAL, example_index=index)
            return await self.client.play(asked, policy), policy

        return play

    async def __aexit__(self, *error):
        await self.client.close()
        await self.gateway.close()
