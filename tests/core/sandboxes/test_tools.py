"""`python` and `bash` in a `ToolEnvironment`: one sandbox a rollout, failures told aright."""

import asyncio
import json

import pytest
from tests.asking import ask
from tests.core.sandboxes.attacks import LIFE_S, MARK, processes_of

from telescope_core import (
    Episode,
    Example,
    RolloutStatus,
    Sampling,
    StopReason,
    ToolEnvironment,
    cleanup,
    reward,
)
from telescope_core.base.retries import play_with_attempts
from telescope_core.errors import UnknownNameError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.sandboxes import EpisodeSandboxes, SandboxError, SandboxSpec
from telescope_core.sandboxes.local.provider import LocalProvider
from telescope_core.scripted import ScriptedClient


class Coder(ToolEnvironment):
    data = ("a", "b")
    max_turns = 9
    spec = SandboxSpec(memory_mb=128, time_to_live_s=60)
    provider = "local"
    limit_s = 60.0

    def __init__(self, config=None):
        super().__init__(config)
        self.sandboxes = EpisodeSandboxes(
            self.provider, self.spec, max_open=2, timeout_s=self.limit_s
        )

    def tools(self):
        return [self.sandboxes.python, self.sandboxes.bash]

    @cleanup
    async def give_back(self, episode: Episode):
        await self.sandboxes.release(episode)

    @reward
    async def made_it(self, episode: Episode):
        box = await self.sandboxes.sandbox(episode)
        return float(await box.read("answer.txt") == b"42\n")

    async def close(self):
        await super().close()
        await self.sandboxes.close()


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def played(environment: Coder, *turns: str):
    client = InProcessEnvironment(environment, name="coder")
    try:
        return await client.play(ask(deadline_s=60), ScriptedClient(list(turns)).policy("r"))
    finally:
        await client.close()


async def test_a_rollout_works_in_one_sandbox_that_its_reward_reads():
    environment = Coder.from_settings({})
    rollout = await played(
        environment,
        call("bash", command="echo 41 > n; ls /nowhere"),
        call(
            "python", code="n = int(open('n').read())\nopen('answer.txt', 'w').write(f'{n + 1}\\n')"
        ),
        call("python", code="raise ValueError('told')"),
        "done",
    )
    assert rollout.status is RolloutStatus.KEPT, rollout.error
    assert rollout.reward == 1.0
    told = "\n".join(str(message.content) for message in rollout.messages)
    for expected in ("[standard error]", "[exit code 2]", "[no output]", "ValueError: told"):
        assert expected in told
    usage = environment.sandboxes.usage()
    assert (usage.num_created, usage.num_open) == (1, 0)


@pytest.mark.slow
async def test_a_program_without_an_end_is_stopped_and_the_model_is_told():
    class Hurried(Coder):
        limit_s = 0.2

        @reward
        async def made_it(self, episode: Episode):
            return 1.0

    rollout = await played(
        Hurried.from_settings({}), call("python", code="while True: pass"), "done"
    )
    assert rollout.status is RolloutStatus.KEPT, rollout.error
    assert "[stopped after 0.2 s]" in "\n".join(str(one.content) for one in rollout.messages)


class Gone(LocalProvider):
    async def create(self, spec):
        raise SandboxError("the provider is gone")


async def test_a_provider_that_fails_fails_the_rollout_and_is_not_told_to_the_model():
    class OnGone(Coder):
        provider = Gone()

    rollout = await played(OnGone.from_settings({}), call("bash", command="true"), "done")
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error is not None
    assert rollout.error.startswith("SandboxError: the provider is gone")


def test_the_model_sees_code_and_command_alone():
    shown = {tool.name: tool.schema for tool in Coder.from_settings({}).function_tools()}
    assert set(shown) == {"python", "bash"}
    for name, argument in (("python", "code"), ("bash", "command")):
        parameters = shown[name]["function"]["parameters"]
        assert list(parameters["properties"]) == [argument]
        assert parameters["properties"][argument]["description"]


class FailsOnce(LocalProvider):
    num_asked = 0

    async def create(self, spec):
        self.num_asked += 1
        if self.num_asked == 1:
            raise SandboxError("the provider was restarted")
        return await super().create(spec)


async def test_a_rollout_that_lost_its_sandbox_is_played_again():
    class OnFailsOnce(Coder):
        provider = FailsOnce()

    client = InProcessEnvironment(OnFailsOnce.from_settings({}), name="coder")
    turns = [call("bash", command="echo 42 > answer.txt"), "done"]
    rollout = await play_with_attempts(
        lambda attempt: client.play(ask(deadline_s=60), ScriptedClient(list(turns)).policy("r"))
    )
    await client.close()
    assert (rollout.reward, rollout.attempt) == (1.0, 2)


class Slow(LocalProvider):
    async def create(self, spec):
        made = await super().create(spec)
        try:
            await asyncio.Event().wait()
        finally:
            await made.close()
        return made


@pytest.mark.slow
async def test_a_provider_that_never_answers_costs_no_more_than_the_deadline():
    slow = Slow()

    class OnSlow(Coder):
        provider = slow
        spec = SandboxSpec(time_to_live_s=LIFE_S)

    client = InProcessEnvironment(OnSlow.from_settings({"tool_timeout_s": 600}), name="coder")
    policy = ScriptedClient([call("bash", command="true"), "done"]).policy("r")
    rollout = await client.play(ask(deadline_s=0.4), policy)
    await client.close()
    assert rollout.stop_reason is StopReason.TIMEOUT
    assert slow._open == set()
    assert processes_of(MARK) == []


async def test_a_provider_is_opened_when_it_is_needed_and_a_misspelt_one_refused_before():
    with pytest.raises(UnknownNameError, match="did you mean 'local'"):
        EpisodeSandboxes("lokal")
    sandboxes, policy = EpisodeSandboxes("docker"), ScriptedClient([]).policy("r")
    assert sandboxes.usage().num_created == 0
    await sandboxes.close()
    with pytest.raises(SandboxError, match="the sandboxes are closed"):
        await sandboxes.sandbox(
            Episode(Example(id="1", prompt=""), (), policy=policy, sampling=Sampling(max_tokens=1))
        )
