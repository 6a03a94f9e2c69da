"""Agent programs in local sandboxes: played, recorded, scored, and reaching nothing else."""

import asyncio
import os
import socket
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from tests.core.harnesses.agents import AGENT, Counted, playing
from tests.core.sandboxes.attacks import processes_of

from telescope_core import RolloutStatus, StopReason
from telescope_core.errors import ConfigError, EnvironmentLoadError, UnknownNameError
from telescope_core.gateway import Gateway
from telescope_core.harnesses import AgentConfig, AgentEnvironment, CommandHarness
from telescope_core.harnesses.environment import opened_to
from telescope_core.sandboxes import Network, SandboxSpec

LIFE_S = 2_000_000 + os.getpid()
SPEC = SandboxSpec(memory_mb=256, max_processes=64, time_to_live_s=LIFE_S, network=Network.ENDPOINT)


class Marked(Counted):
    """Its sandboxes can be told from those of others."""

    sandbox_spec = SPEC


def nothing_is_left() -> bool:
    return not processes_of(str(LIFE_S + 30))


def changed(**values) -> type[Counted]:
    return type("Changed", (Marked,), values)


@pytest.mark.slow
async def test_a_rollout_is_played_by_the_program_recorded_and_scored_by_its_files():
    async with playing(Marked()) as play:
        rollout, policy = await play("$ wc -l < words > count; cat count", "It has 3.")
        assert rollout.status is RolloutStatus.KEPT, rollout.error
        assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.COMPLETED)
        assert policy.asked == ["How many lines does `words` have?", "3\n"]
        assert len(rollout.turns) == 2
        [said] = rollout.conversations
        assert [m.role for m in said] == ["user", "assistant", "user", "assistant"]
        assert rollout.completion_text == "It has 3."
        assert rollout.tags["agent_ended"] == "exit 0"
        assert nothing_is_left(), "a sandbox ends with its rollout"
        other, _ = await play("3")
        assert (other.reward, other.status) == (0.0, RolloutStatus.KEPT)
        assert policy.session.is_open is False


@pytest.mark.slow
async def test_many_at_once_are_apart():
    async with playing(Marked(AgentConfig(max_sandboxes=2))) as play:
        scripts = [(f"$ echo {i} > mine; cat mine", f"{i}") for i in range(5)]
        played = await asyncio.gather(*(play(*script) for script in scripts))
    assert [policy.asked[1] for _, policy in played] == [f"{i}\n" for i in range(5)]
    assert nothing_is_left()


REACH = """$ python3 - <<'END'
import os, socket
from urllib.parse import urlsplit
own = urlsplit(os.environ["OPENAI_BASE_URL"])
for host, port in ((own.hostname, own.port), {places}):
    try:
        socket.create_connection((host, port), 2).close()
        print("reached", port)
    except OSError:
        print("refused", port)
END"""


@pytest.mark.slow
async def test_the_program_reaches_its_endpoint_and_nothing_else():
    other = Gateway(model="other")
    await other.start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = [server.getsockname()[1], urlsplit(other._server.address).port]
        places = "".join(f"('127.0.0.1', {port}), " for port in ports) + "('1.1.1.1', 53)"
        async with playing(Marked()) as play:
            _, policy = await play(REACH.replace("{places}", places), "done")
    await other.close()
    lines = policy.asked[1].splitlines()
    assert [line.split()[0] for line in lines] == ["reached", *["refused"] * 3], lines
    inside = int(lines[0].split()[1])
    assert inside not in ports


@pytest.mark.slow
async def test_no_key_opens_the_rollout_of_another():
    """The gateway behind the opened address is that of every rollout."""
    code = """$ python3 - <<'END'
import os, urllib.request, urllib.error
base = os.environ["OPENAI_BASE_URL"].split("/rollouts/")[0]
key = os.environ["OPENAI_API_KEY"]
for path in ("/rollouts/another/v1/models", "/metrics", "/"):
    request = urllib.request.Request(base + path, headers={"Authorization": "Bearer " + key})
    try:
        print(urllib.request.urlopen(request).status)
    except urllib.error.HTTPError as error:
        print(error.code)
END"""
    async with playing(Marked()) as play:
        _, policy = await play(code, "done")
    assert policy.asked[1].split() == ["404"] * 3


@pytest.mark.slow
async def test_a_program_that_takes_too_long_is_ended_and_scored_as_it_stands():
    for limit_s in (0.5, 5.0, 60.0):
        async with playing(Marked(AgentConfig(agent_timeout_s=limit_s))) as play:
            rollout, policy = await play("$ echo 3 > count", deadline_s=600.0)
        if len(policy.asked) == 2:
            break  # It came as far as to wait for an answer, however busy this machine is.
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.error
    assert rollout.stop_reason is StopReason.TIMEOUT
    assert rollout.tags["agent_ended"] == "timeout"
    assert nothing_is_left()
    # One that has asked nothing fails, and the reason names the limit that was reached.
    slow = changed(harness=CommandHarness(argv=("sleep", "600")))
    async with playing(slow(AgentConfig(agent_timeout_s=0.5))) as play:
        rollout, _ = await play(deadline_s=600.0)
    assert (rollout.status, rollout.stop_reason) == (RolloutStatus.FAILED, StopReason.TIMEOUT)
    assert "after agent_timeout_s = 0.5 s before it asked" in rollout.error


@pytest.mark.slow
async def test_the_words_of_a_program_that_is_ended_are_kept():
    code = "import time; print('begun'); time.sleep(600)"
    slow = changed(harness=CommandHarness(argv=("python3", "-c", code)))
    for limit_s in (1.0, 8.0, 60.0):
        async with playing(slow(AgentConfig(agent_timeout_s=limit_s))) as play:
            rollout, _ = await play(deadline_s=600.0)
        said = [note.value for note in rollout.info if note.key == "agent_stdout"]
        if said:
            break  # it came as far as to print
    assert said == ["begun\n"]


def test_a_setting_of_agents_is_refused_as_an_attribute_of_the_class():
    for name, value in {"max_turns": 3, "agent_timeout_s": 5.0, "max_turn": 3}.items():
        with pytest.raises(EnvironmentLoadError, match=f"{name}.* it is a setting: --env"):
            changed(**{name: value})


async def test_a_program_that_breaks_after_an_answer_is_scored():
    """The model's commands can break it, and must not earn another try by that."""
    async with playing(Marked()) as play:
        rollout, _ = await play("$ kill -9 $PPID; sleep 5")
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 0.0), rollout.error
    assert rollout.tags["agent_ended"].startswith("exit ")


async def test_a_program_that_never_asks_fails_with_what_it_wrote():
    lazy = changed(harness=CommandHarness(argv=("sh", "-c", "echo no module >&2; exit 1")))
    async with playing(lazy()) as play:
        rollout, _ = await play("never")
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert "ended without an answer of the model" in rollout.error
    assert [(note.key, note.value) for note in rollout.info] == [("agent_stderr", "no module\n")]


async def test_a_rollout_that_is_cancelled_leaves_nothing_running():
    environment = Marked()
    async with playing(environment) as play:
        waiting = asyncio.create_task(play("$ sleep 600 & echo on"))
        while not processes_of(str(LIFE_S + 30)):  # noqa: ASYNC110 - it is another's process
            await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert nothing_is_left()


@pytest.mark.slow
async def test_an_answer_file_that_cannot_be_read_is_an_empty_answer():
    odd = changed(
        harness=CommandHarness(
            argv=("python3", "/tmp/agent/agent.py", "{task}"),
            files={"/tmp/agent/agent.py": AGENT},
            answer_file="/tmp/agent/answer",
        )
    )
    async with playing(odd()) as play:
        rollout, _ = await play("$ mkdir -p /tmp/agent/answer; echo 3 > count", "done")
    assert (rollout.status, rollout.completion_text) == (RolloutStatus.KEPT, "")


def test_packages_that_are_not_installed_are_refused_with_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setenv("TELESCOPE_AGENTS", str(tmp_path))
    with pytest.raises(EnvironmentLoadError, match="telescope agent install mini-swe-agent"):
        changed(harness="mini-swe-agent")()
    assert list(tmp_path.iterdir()) == []


def test_the_settings_choose_another_program():
    argv = ["python3", "-c", "print(1)"]
    other = Counted(AgentConfig(harness="command", harness_options={"argv": argv}))
    assert other._harness.name == "command"
    with pytest.raises(UnknownNameError, match="did you mean 'mini-swe-agent'"):
        Counted(AgentConfig(harness="mini-swe"))
    with pytest.raises(ConfigError, match=r"set env\.harness too"):
        Counted(AgentConfig(harness_options={"argv": argv}))
    for options in ({"argv": []}, {"answer_file": "answer"}):
        with pytest.raises(ConfigError, match=r"needs argv, the list"):
            Counted(AgentConfig(harness="command", harness_options=options))


def test_a_program_that_may_take_longer_than_its_sandbox_lives_is_refused():
    with pytest.raises(ConfigError, match=r"agent_timeout_s.*\b3600\b"):
        Counted(AgentConfig(agent_timeout_s=3600.0))


def test_an_environment_without_a_program_says_which_there_are():
    with pytest.raises(EnvironmentLoadError) as refused:
        changed(harness="")()
    assert "harness" in str(refused.value)
    assert "mini-swe-agent" in str(refused.value)


async def test_a_sandbox_with_the_whole_network_gets_the_address_as_it_is():
    class Whole(Counted):
        sandbox_spec = replace(SPEC, network=Network.FULL)

    async with opened_to(None, Whole().place(None), "https://somewhere/v1") as seen:
        assert seen == "https://somewhere/v1"
    with pytest.raises(ConfigError, match="endpoints of http alone"):
        async with opened_to(None, Marked().place(None), "https://somewhere/v1"):
            pass
    assert issubclass(Whole, AgentEnvironment)
