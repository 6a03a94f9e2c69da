"""A policy that answers from a script at a gateway, and an agent of a few lines."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager

from tests.asking import ask

from telescope_core import Example, ListSource, reward, setup
from telescope_core.gateway import Gateway, RecordedEnvironment
from telescope_core.gateway.policies import RecordingPolicy
from telescope_core.harnesses import AgentEnvironment, CommandHarness
from telescope_core.in_process import InProcessEnvironment
from telescope_core.types import Completion, Message, Sampling, Turn

SAMPLING = Sampling(max_tokens=50)
AGENT = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append({"role": "assistant", "content": said["content"]})
    if not said["content"].startswith("$ "):
        print(said["content"])
        break
    done = subprocess.run(said["content"][2:], shell=True, capture_output=True, text=True)
    messages.append({"role": "user", "content": done.stdout + done.stderr})
"""
"""It runs what the model writes behind `$ `, and ends with the first other answer."""
HARNESS = CommandHarness(
    argv=("python3", "/tmp/agent/agent.py", "{task}"), files={"/tmp/agent/agent.py": AGENT}
)


class Counted(AgentEnvironment):
    """Write how many lines the file `words` has to the file `count`."""

    harness = HARNESS

    def examples(self, split):
        return ListSource([Example(id="one", prompt="How many lines does `words` have?")])

    @setup
    async def put_words(self, episode):
        await (await self.sandbox(episode)).write("words", b"a\nb\nc\n")

    @reward
    async def right(self, episode):
        return float((await self.file_text(episode, "count") or "").strip() == "3")


class ScriptedPolicy(RecordingPolicy):
    """Answers each request with the next of `replies`, or with what a function makes of it."""

    def __init__(self, gateway: Gateway, replies: Sequence[str | Callable[[str], str]]) -> None:
        super().__init__()
        self.replies = list(replies)
        self.asked: list[str] = []
        self.session = gateway.open(self, SAMPLING)

    async def complete(self, messages, sampling, *, tools=()):
        raise AssertionError("the environment itself asks for nothing")

    async def answer(self, request) -> Completion:
        self.asked.append(request.messages[-1].content)
        self.recorder.was_asked = True
        if not self.replies:
            await asyncio.Event().wait()
        said = self.replies.pop(0)
        text = said if isinstance(said, str) else said(self.asked[-1])
        message = Message(role="assistant", content=text)
        completion = Completion(
            message=message, finish_reason="stop", num_prompt_tokens=1, num_completion_tokens=1
        )
        self.recorder.answered(
            request.messages, Turn(completion=completion, started_s=0.0, ended_s=0.0)
        )
        self.recorder.heard(request.messages, completion)
        return completion


@asynccontextmanager
async def playing(environment: AgentEnvironment):
    """Yield a function that plays a rollout with a script, and returns it with its policy."""
    gateway = Gateway(model="policy")
    await gateway.start()
    client = RecordedEnvironment(InProcessEnvironment(environment, name="agent"))

    async def play(*replies, deadline_s: float = 300.0):
        policy = ScriptedPolicy(gateway, replies)
        return await client.play(ask(deadline_s=deadline_s), policy), policy

    try:
        yield play
    finally:
        await client.close()
        await gateway.close()
