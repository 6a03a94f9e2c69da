"""Environments that behave, and environments that do what none should."""

import asyncio
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress

from telescope_core import (
    Completion,
    EnvironmentConfig,
    Example,
    ListSource,
    Message,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    StopReason,
    ToolEnvironment,
    Turn,
    group_reward,
    metric,
    reward,
    setup,
)
from telescope_core.base.chains import sampled_tokens
from telescope_core.environments.toolbox import ToolConfig
from telescope_core.judge import Judge, JudgeConfig


class Graded(SingleTurnEnvironment):
    """A judge grades the answer."""

    class Config(EnvironmentConfig):
        judge: JudgeConfig = JudgeConfig()

    def __init__(self, config=None):
        super().__init__(config)
        self.judge = Judge(self.config.judge, self)

    def examples(self, split):
        return ListSource([Example(id="sea", prompt="Describe the sea.")])

    @reward
    async def good(self, rollout, example):
        return (await self.judge.score(rollout, example, rubric="1 when it is vivid.")).score


class Secretive(SingleTurnEnvironment):
    """Declares a secret only once it is built, which is after its greeting."""

    def __init__(self, config=None):
        super().__init__(config)
        self.secrets = ("DB_PASSWORD",)

    def examples(self, split):
        return ListSource([Example(id="a", prompt="?")])

    @reward
    def fine(self, rollout, example):
        return 1.0


HALF = "\ud83d"


class Halves(MultiTurnEnvironment):
    """Has half of a surrogate pair in a text, another one for each example."""

    max_turns = 2

    def examples(self, split):
        wheres = ("prompt", "reply", "reward", "records")
        return ListSource([Example(id=one, prompt=one, answer=one) for one in wheres])

    def format_prompt(self, example):
        return HALF if example.id == "prompt" else example.id

    def env_response(self, messages, episode):
        return HALF if episode.example.id == "reply" else None

    def golden_answers(self, example):
        return {"half": HALF}

    @reward
    def fine(self, example, episode):
        if example.id == "reward":
            raise ValueError(f"it is {HALF}")
        episode.tags[HALF] = HALF
        episode.note(HALF, HALF)
        return 1.0

    @group_reward
    def shared(self, rollouts):
        return [{}[f"{HALF}/{one.index}"] for one in rollouts]


class TakesSignals(SingleTurnEnvironment):
    """Its constructor does what only the main thread may, as some frameworks do."""

    def __init__(self, config=None):
        super().__init__(config)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        self.slept = asyncio.run(asyncio.sleep(0, "slept"))

    def examples(self, split):
        return ListSource([Example(id="pid", prompt="?")])

    async def play(self, episode):
        episode.tags["pid"] = str(os.getpid())
        await episode.generate()

    @reward
    def built(self, rollout, example):
        return float(self.slept == "slept")


class Remembers(SingleTurnEnvironment):
    """Rewards find what was played by the id of the rollout."""

    reward_max = 2.0

    def __init__(self, config=None):
        super().__init__(config)
        self.said = {}

    def examples(self, split):
        return ListSource([Example(id="one", prompt="?")])

    async def play(self, episode):
        self.said[episode.rollout_id] = (await episode.generate()).message.content

    @reward
    def alone(self, rollout, example, episode):
        assert episode.rollout_id == rollout.rollout_id
        return float(self.said[episode.rollout_id] == rollout.completion_text)

    @group_reward
    def together(self, rollouts):
        return [float(self.said.pop(one.rollout_id) == one.completion_text) for one in rollouts]


class Echo(SingleTurnEnvironment):
    """The answer is the prompt."""

    reward_max = 2.0

    class Config(EnvironmentConfig):
        size: int = 40

    def examples(self, split):
        return ListSource(
            [
                Example(id=f"{split}-{i}", prompt=str(i), answer=str(i), info={"row": [i, None]})
                for i in range(self.config.size)
            ]
        )

    def gold_answer(self, example):
        return example.answer

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.answer)

    @metric
    def num_tokens(self, rollout, example):
        return float(rollout.num_completion_tokens)

    @group_reward
    def shared(self, rollouts, example):
        return [sum(r.rewards["correct"] for r in rollouts) / len(rollouts)] * len(rollouts)


class Counting(MultiTurnEnvironment, Echo):
    """Three turns, with a little state."""

    def env_response(self, messages, episode):
        count = int(episode.state.get("count", 0)) + 1
        episode.state["count"] = count
        return None if count == 3 else f"go on {count}"


class BadReward(Echo):
    @reward
    def broken(self, rollout, example):
        raise ZeroDivisionError("there is nothing to divide by")


class Hangs(Echo):
    """Example 1 holds the event loop for good."""

    async def env_step(self, episode):
        while episode.example.answer == "1":
            time.sleep(0.01)  # noqa: ASYNC251 (what nobody should do)

    async def play(self, episode):
        stop = await super().play(episode)
        await self.env_step(episode)
        return stop


class EndlessTool(ToolEnvironment, Echo):
    """A tool that never returns, and one that does."""

    class Config(ToolConfig):
        size: int = 40

    def tools(self):
        return [self.wait, self.double]

    def wait(self) -> str:
        """Wait for good."""
        while True:
            time.sleep(0.05)

    def double(self, number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number


class Holds(Echo):
    """Code of example 1 ends its process, or holds every thread of it, where `how` says."""

    class Config(EnvironmentConfig):
        size: int = 40
        how: str = "pattern"
        where: str = "reward"

    def harm(self, example, where):
        if example.answer != "1" or self.config.where != where:
            return
        match self.config.how:
            case "pattern":
                re.match(r"^(a|aa)+$", "a" * 64 + "b")
            case "number":
                str(10**10**9)
            case "exit":
                os._exit(3)
            case "crash":
                ctypes.string_at(0)
            case "sleep":
                time.sleep(600)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def format_prompt(self, example):
        self.harm(example, "prompt")
        return example.prompt

    @setup
    def prepares(self, episode):
        self.harm(episode.example, "setup")

    async def play(self, episode):
        await episode.generate()
        self.harm(episode.example, "play")

    @reward
    def holds(self, rollout, example):
        self.harm(example, "reward")
        return 0.0

    @group_reward
    def holds_all(self, rollouts, example):
        self.harm(example, "group")
        return [0.0] * len(rollouts)


class KillsOften(Echo):
    """Every third example ends its process as nobody can see: in its code, or while it waits."""

    async def play(self, episode):
        kills = int(episode.example.answer) % 3 == 0
        if kills and int(episode.example.answer) % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kills:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        await episode.generate()
        if kills:
            await asyncio.sleep(60)

    @group_reward
    def both(self, rollouts, example):
        return [0.0] * len(rollouts)


class EndlessReward(Echo):
    """The reward of example 1 never returns."""

    @reward
    def endless(self, rollout, example):
        while example.answer == "1":
            time.sleep(0.05)
        return 0.0


class EndlessScore(Echo):
    """The reward of example 1 never comes, and blocks nothing."""

    @reward
    async def endless(self, rollout, example):
        if example.answer == "1":
            await asyncio.Event().wait()
        return 0.0


class Hungry(Echo):
    """Example 1 asks for far too much at once; example 2 grows to 384 MiB and keeps them."""

    @reward
    def fills_memory(self, rollout, example):
        if example.answer == "1":
            return float(len(bytearray(1 << 40)))
        kept = []
        while example.answer == "2":
            if len(kept) < 48:  # less than the limit of addresses, which would raise instead
                kept.append(b"x" * (8 << 20))
            time.sleep(0.002)
        return 0.0


class Suicidal(Echo):
    """Example 1 kills its process; `who` tells which process played."""

    async def play(self, episode):
        stop = await super().play(episode)
        if episode.example.answer == "1":
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        episode.tags["pid"] = str(os.getpid())
        return stop


class Parent(Echo):
    """Starts a program that would outlive it."""

    async def play(self, episode):
        stop = await super().play(episode)
        child = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 (the simplest way to start one)
        episode.tags.update(pid=str(os.getpid()), child=str(child.pid))
        return stop


class Nosy(Echo):
    """Looks at its environment variables."""

    secrets = ("TOY_SECRET",)

    async def play(self, episode):
        stop = await super().play(episode)
        for name in ("TOY_SECRET", "TOY_TOKEN", "PATH", "TELESCOPE_WORKER_TOKEN"):
            episode.tags[name] = os.environ.get(name, "")
        return stop


class Talkative(Echo):
    """Says what it knows, on three ways."""

    secrets = ("TOY_SECRET",)

    async def play(self, episode):
        stop = await super().play(episode)
        logging.getLogger(__name__).info("the secret is %s", os.environ["TOY_SECRET"])
        warnings.warn("this toy is old", stacklevel=1)
        print("printed", flush=True)
        episode.tags["variables"] = " ".join(os.environ)
        return stop


class Stubborn(Echo):
    """Does not end when it is cancelled, for a second."""

    async def play(self, episode):
        ends_s = time.monotonic() + 1
        while time.monotonic() < ends_s:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)
        return StopReason.COMPLETED


class Wordy(Echo):
    """Says more than a message may hold."""

    @metric
    def big(self, rollout, example):
        return float(len(re.sub("a", "b", rollout.completion_text)))


class TellsEndpoint(Echo):
    """Reports the chat endpoint it was given."""

    async def play(self, episode):
        given = episode.endpoint
        episode.tags["endpoint"] = f"{given.base_url} {given.api_key} {given.model}"
        return await super().play(episode)


class Shielded(Echo):
    """Asks the policy where no cancel reaches it."""

    async def play(self, episode):
        return await asyncio.shield(super().play(episode))


class Liar(Echo):
    """Claims a turn that the policy never took, with tokens of its own."""

    async def play(self, episode):
        message = Message(role="assistant", content="mine")
        claimed = Completion(
            message=message, finish_reason="stop", tokens=sampled_tokens((), (1, 2), (-1.0, -2.0))
        )
        episode.turns.append(Turn(completion=claimed, started_s=0.0, ended_s=1.0))
        return StopReason.COMPLETED


class Escapes(Echo):
    """Raises, in the rollouts of the first examples, what is no Exception."""

    async def play(self, episode):
        stop = await super().play(episode)
        match episode.example.answer:
            case "0":
                sys.exit()
            case "1":
                raise asyncio.CancelledError
            case "2":  # as a cancel scope does that was left behind
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(60)
        return stop

    def gold_answer(self, example):
        sys.exit("no gold")
