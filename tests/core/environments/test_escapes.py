"""What environment code raises beside Exception fails its rollout, and ends nothing else."""

import asyncio
import signal
import sys
from contextlib import suppress

import pytest
from tests.asking import ask
from tests.core.one_rollout import One, play

from telescope_core import (
    Environment,
    Example,
    ToolEnvironment,
    cleanup,
    group_reward,
    reward,
    runs_in,
    setup,
    stop,
    tool,
)
from telescope_core.environments.author_errors import contained
from telescope_core.errors import CodeExitError, EnvironmentLoadError, StrayCancelError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Group, RolloutStatus, Split


class Panic(BaseException):
    """What extension modules raise when their own code breaks."""


ESCAPES = {
    "exit": (lambda: sys.exit("bye"), "CodeExitError", "sys.exit('bye') was called"),
    "silent exit": (lambda: sys.exit(), "CodeExitError", "sys.exit(None) was called"),
    "cancel": (asyncio.CancelledError, "StrayCancelError", "CancelledError was raised"),
    "panic": (lambda: Panic("torn"), "CodeExitError", "Panic('torn') was raised"),
}


def escape(kind):
    made = ESCAPES[kind][0]()
    raise made


class InterruptsReward(One):
    @reward
    def right(self):
        raise KeyboardInterrupt


async def test_an_interrupt_that_code_in_a_thread_raises_is_its_own():
    """One from the keyboard is raised in the main thread alone."""
    rollout = await play(InterruptsReward())
    assert rollout.status_reason == "CodeExitError"
    assert "KeyboardInterrupt() was raised (" in rollout.error


class InReward(One):
    kind = "exit"

    @reward
    def right(self):
        escape(self.kind)


class InQuickReward(One):
    kind = "exit"

    @reward
    @runs_in("loop")
    def right(self):
        escape(self.kind)


class InAsyncReward(One):
    kind = "exit"

    @reward
    async def right(self):
        await asyncio.sleep(0)
        escape(self.kind)


class InSetup(InReward):
    @setup
    def begin(self, episode):
        escape(self.kind)


class InStop(InReward):
    @stop
    def done(self, episode):
        escape(self.kind)


class InTotal(InReward):
    @reward
    def right(self):
        return 1.0

    def compute_reward(self, rollout, example):
        escape(self.kind)


class InPlay(InReward):
    async def play(self, episode):
        await episode.generate()
        escape(self.kind)


class InPrompt(InReward):
    def format_prompt(self, example):
        escape(self.kind)


class InExamples(InReward):
    def examples(self, split):
        escape(self.kind)


class InGolden(InTotal):
    compute_reward = Environment.compute_reward

    def golden_answers(self, example):
        escape(self.kind)


PLACES = [
    *(InReward, InQuickReward, InAsyncReward, InSetup, InStop, InTotal, InPlay),
    *(InPrompt, InExamples, InGolden),
]


@pytest.mark.parametrize("kind", ESCAPES)
@pytest.mark.parametrize("place", PLACES)
async def test_what_is_no_exception_fails_the_rollout_with_its_place(place, kind):
    environment = place()
    environment.kind = kind
    rollout = await play(environment)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    _, error, said = ESCAPES[kind]
    assert rollout.status_reason == error or place is InExamples
    assert said in rollout.error
    assert "test_escapes.py:" in rollout.error


async def test_a_failed_rollout_keeps_its_conversation():
    rollout = await play(InReward())
    assert [one.role for one in rollout.messages] == ["user", "assistant"]


class ByAScope(InReward):
    """A scope of a library that was left behind cancels its task, as if somebody had asked."""

    async def play(self, episode):
        await episode.generate()
        asyncio.current_task().cancel()
        await asyncio.sleep(60)


async def test_a_cancellation_that_the_code_asks_of_its_own_task_is_a_failure():
    rollout = await play(ByAScope())
    assert (rollout.status, rollout.status_reason) == (RolloutStatus.FAILED, "StrayCancelError")


class Waits(InTotal):
    compute_reward = Environment.compute_reward

    async def play(self, episode):
        await episode.generate()
        self.waiting.set()
        await asyncio.sleep(60)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_cancellation_that_somebody_asked_for_is_one(how):
    environment = Waits()
    environment.waiting = asyncio.Event()
    client = InProcessEnvironment(environment, name="it")
    task = asyncio.create_task(client.play(ask(), ScriptedClient(["yes"]).policy("r")))
    await environment.waiting.wait()
    await (client.cancel("g/0") if how == "cancel" else client.close())
    assert (await task).status is RolloutStatus.CANCELLED
    await client.close()


class InCleanup(InTotal):
    compute_reward = Environment.compute_reward

    @cleanup
    def close_it(self, episode):
        sys.exit("no")


async def test_a_cleanup_that_exits_is_noted():
    rollout = await play(InCleanup())
    assert rollout.reward == 1.0
    assert "close_it raised CodeExitError: sys.exit('no') was called" in rollout.tags["cleanup"]


class InGroup(InTotal):
    compute_reward = Environment.compute_reward

    @group_reward
    def best(self, rollouts):
        sys.exit(3)


async def test_a_group_reward_that_exits_is_an_exception():
    client = InProcessEnvironment(InGroup(), name="it")
    rollout = await client.play(ask(), ScriptedClient(["yes"]).policy("r"))
    group = Group(id="g", environment="it", example_id="one", rollouts=(rollout,))
    with pytest.raises(CodeExitError, match=r"sys.exit\(3\)"):
        await client.score_group(Split.TRAIN, 0, group)
    await client.close()


class Calls(ToolEnvironment):
    def examples(self, split):
        return [Example(id="a", prompt="p")]

    @tool
    def leave(self) -> str:
        """Leave."""
        sys.exit(2)

    @tool
    async def drop(self) -> str:
        """Drop it."""
        raise asyncio.CancelledError

    @reward
    def right(self):
        return 1.0


@pytest.mark.parametrize(("name", "told"), [("leave", "SystemExit: 2"), ("drop", "CancelledError")])
async def test_the_policy_is_told_of_a_tool_that_exits(name, told):
    """Such as a program's main function, which exits when its arguments are wrong."""
    call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    rollout = await play(Calls.from_settings({"tool_call_format": "xml"}), [call, "done"])
    assert rollout.reward == 1.0, rollout.error
    assert told in rollout.messages[-2].content
    assert rollout.metrics["tool_errors/raised"] == 1


class Interrupted(InReward):
    async def play(self, episode):
        raise KeyboardInterrupt


def test_an_interrupt_from_the_keyboard_stays_one():
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(play(Interrupted()))


def test_an_exit_of_a_signal_handler_stays_one():
    """A program may end itself so on SIGTERM, in whatever code it is at that moment."""

    def leave(number, frame):
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit), contained():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


class InInit(InReward):
    def __init__(self, config=None):
        sys.exit("no data")


class InSplits(InReward):
    def splits(self):
        raise asyncio.CancelledError


async def test_opening_and_describing_are_contained_too():
    with pytest.raises(EnvironmentLoadError, match="no data"):
        InInit.from_settings({})
    client = InProcessEnvironment(InSplits(), name="it")
    with pytest.raises((StrayCancelError, EnvironmentLoadError), match="CancelledError"):
        await client.describe()
    with suppress(StrayCancelError):
        await client.close()
