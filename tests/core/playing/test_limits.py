"""A limit that is reached while a rollout is played is an outcome: it is scored as it stands."""

import asyncio
import re
import threading

import pytest
from tests.asking import ask
from tests.core.one_rollout import let_time_pass, wait_for_ever

from telescope_core import (
    Example,
    ListSource,
    MultiTurnEnvironment,
    RolloutStatus,
    StopReason,
    reward,
    setup,
)
from telescope_core.base.protocols import LATE_SCORE_S
from telescope_core.base.retries import play_with_attempts
from telescope_core.errors import ContextLengthError, EndpointError, JudgeError
from telescope_core.evals import EvalSettings, run_eval
from telescope_core.gateway.policies import RecordedEnvironment, RecordingPolicy
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Message, Sampling, Turn

NEVER = threading.Event()
TOO_LONG = [
    ContextLengthError("a prompt of 90 tokens, but max_model_len is 64"),
    EndpointError("answered 400: This model's maximum context length is 64 tokens"),
]


class Count(MultiTurnEnvironment):
    """Pays for each turn that the policy took."""

    reward_max = 10.0

    def examples(self, split):
        return ListSource([Example(id=f"{n}", prompt="go") for n in range(4)])

    def env_response(self, messages, episode):
        return "more"

    @reward
    def turns(self, rollout, example):
        return float(sum(message.role == "assistant" for message in rollout.messages))


async def play(environment, policy, **particulars):
    client = InProcessEnvironment(environment, name="it")
    try:
        return await client.play(ask(**particulars), policy)
    finally:
        await client.close()


@pytest.mark.parametrize("error", TOO_LONG, ids=lambda error: type(error).__name__)
async def test_a_later_turn_without_room_ends_the_rollout_which_is_scored(error):
    policy = ScriptedClient(["one", "two", error]).policy("r")
    rollout = await play(Count(), policy)
    assert (rollout.status, rollout.error) == (RolloutStatus.KEPT, None)
    assert (rollout.stop_reason, rollout.reward) == (StopReason.CONTEXT_LENGTH, 2.0)
    (note,) = rollout.info
    assert str(error) in note.value
    assert "to make it shorter, look at" in note.value


@pytest.mark.parametrize("error", TOO_LONG, ids=lambda error: type(error).__name__)
async def test_a_first_turn_without_room_is_a_mistake_in_the_settings(error):
    rollout = await play(Count(), ScriptedClient([error]).policy("r"))
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.stop_reason is StopReason.CONTEXT_LENGTH


async def test_the_context_of_a_judge_is_no_limit_of_the_policy():
    class Judged(Count):
        def env_response(self, messages, episode):
            raise JudgeError("answered 400: maximum context length is 64")

    rollout = await play(Judged(), ScriptedClient(["one"]).policy("r"))
    assert (rollout.status, rollout.stop_reason) == (RolloutStatus.FAILED, StopReason.ERROR)


class Slow:
    """Answers `num_turns` times, and then not any more, until every deadline is over."""

    endpoint = None

    def __init__(self, num_turns: int = 0) -> None:
        self._left = num_turns

    async def complete(self, messages, sampling, *, tools=()):
        self._left -= 1
        if self._left < 0:
            await wait_for_ever()
        return Completion(message=Message(role="assistant", content="said"), finish_reason="stop")


@pytest.mark.parametrize("num_turns", [0, 1, 2])
async def test_what_is_there_at_the_deadline_is_scored_on_request(num_turns):
    rollout = await play(Count(), Slow(num_turns), deadline_s=60.0, scores_at_deadline=True)
    assert (rollout.status, rollout.error) == (RolloutStatus.KEPT, None)
    assert (rollout.stop_reason, rollout.reward) == (StopReason.TIMEOUT, float(num_turns))


async def test_without_the_request_a_deadline_leaves_no_reward():
    rollout = await play(Count(), Slow(1), deadline_s=60.0)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.stop_reason is StopReason.TIMEOUT


async def test_rewards_that_take_longer_than_the_deadline_are_not_the_policys_doing():
    class Judging(Count):
        @reward
        async def judged(self, rollout, example):
            await wait_for_ever()

    policy = ScriptedClient(["said"] * 10).policy("r")
    rollout = await play(Judging(), policy, deadline_s=60.0, scores_at_deadline=True)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert (rollout.stop_reason, rollout.tags["failed_in"]) == (StopReason.TIMEOUT, "reward")
    assert re.search(r"of 60 s while reward Judging\.judged \(\S+:\d+\) ran$", rollout.error)
    assert rollout.score_s > 0


class Hangs(Count):
    """Waits for ever in the method `where`; a method in a thread lets the time pass first."""

    where = ""
    loop = None

    @setup
    async def prepare(self, episode):
        await self._hang("prepare")

    async def env_response(self, messages, episode):
        await self._hang("env_response")
        return "more"

    @reward
    def shape(self, completion):
        if self.where == "shape":
            self.loop.call_soon_threadsafe(let_time_pass)
            NEVER.wait()
        return 0.0

    async def _hang(self, here):
        if self.where == here:
            await wait_for_ever()


@pytest.mark.parametrize(
    ("where", "failed_in", "said"),
    [
        ("prepare", "play", r"setup Hangs\.prepare \(\S+:\d+\) ran"),
        ("env_response", "play", r"play Hangs\.env_response \(\S+:\d+\) ran"),
        ("shape", "reward", r"reward Hangs\.shape \(\S+:\d+\) ran"),
        ("", "play", "it waited for the answer of the policy"),
    ],
)
async def test_a_deadline_names_what_was_going_on(where, failed_in, said):
    environment = Hangs()
    environment.where, environment.loop = where, asyncio.get_running_loop()
    policy = ScriptedClient(["said"] * 10).policy("r") if where else Slow(1)
    rollout = await play(environment, policy, deadline_s=60.0)
    assert (rollout.stop_reason, rollout.tags["failed_in"]) == (StopReason.TIMEOUT, failed_in)
    assert re.search(rf"of 60 s while {said}$", rollout.error)
    assert (rollout.score_s > 0) == (failed_in == "reward")


async def test_what_was_canceled_before_the_deadline_is_not_named():
    class Silent:
        endpoint = None

        async def complete(self, messages, sampling, *, tools=()):
            await asyncio.Event().wait()

    class Impatient(Count):
        async def play(self, episode):
            asking = asyncio.create_task(episode.generate())
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            await wait_for_ever()

    rollout = await play(Impatient(), Silent(), deadline_s=60.0)
    assert "while play " in rollout.error
    assert "Impatient.play" in rollout.error


async def test_a_timeout_of_the_environments_own_is_no_deadline():
    class Gives(Count):
        @reward
        async def up(self, completion):
            raise TimeoutError

    rollout = await play(Gives(), ScriptedClient(["said"] * 10).policy("r"), deadline_s=60.0)
    assert "deadline" not in rollout.error
    assert "Gives.up" in rollout.error
    assert rollout.tags["failed_in"] == "reward"


async def test_scoring_what_was_there_has_a_deadline_too(monkeypatch):
    monkeypatch.setattr("telescope_core.playing.rollout.LATE_SCORE_S", 50.0)

    class Judging(Count):
        @reward
        async def judged(self, rollout, example):
            await wait_for_ever()

    rollout = await play(Judging(), Slow(1), deadline_s=60.0, scores_at_deadline=True)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.stop_reason is StopReason.TIMEOUT
    assert re.search(r"50 s while reward Judging\.judged \(\S+:\d+\) ran$", rollout.error)
    assert LATE_SCORE_S > 1


async def test_a_reward_that_raises_after_the_deadline_is_final():
    class Picky(Count):
        @reward
        def first(self, rollout, example):
            return float(next(m.content for m in rollout.messages if m.role == "assistant"))

    asked = []

    async def once(attempt):
        asked.append(attempt)
        return await play(Picky(), Slow(), deadline_s=60.0, scores_at_deadline=True)

    rollout = await play_with_attempts(once)
    assert (rollout.status, rollout.tags["failed_in"]) == (RolloutStatus.FAILED, "reward")
    assert asked == [1]


async def test_an_eval_scores_a_conversation_that_fills_the_context():
    script = ScriptedClient(lambda messages: TOO_LONG[1] if len(messages) > 4 else "said")
    client = InProcessEnvironment(Count(), name="it")
    rows = []
    settings = EvalSettings(
        num_examples=2, rollouts=2, ks=(1,), sampling=Sampling(max_tokens=8), max_retries=2
    )
    result = await run_eval(client, script, settings, on_rollout=rows.append)
    await client.close()
    assert (result.num_scored, result.num_failed, result.num_retried) == (4, 0, 0)
    assert {row.stop_reason for row in rows} == {StopReason.CONTEXT_LENGTH}
    assert {row.reward for row in rows} == {2.0}


class Recorded(RecordingPolicy):
    """A recording policy over a script."""

    def __init__(self, *replies, trouble: str = "") -> None:
        super().__init__()
        self._inner = ScriptedClient(list(replies)).policy("r")
        self._trouble = trouble

    @property
    def trouble(self):
        return self._trouble

    async def complete(self, messages, sampling, *, tools=()):
        asked = tuple(messages)
        self.recorder.was_asked = True
        try:
            completion = await self._inner.complete(messages, sampling, tools=tools)
        except (EndpointError, ContextLengthError) as error:
            self.recorder.failed(asked, error)
            raise
        self.recorder.answered(asked, _turn(completion))
        return completion

    async def answer(self, request):
        raise NotImplementedError


def _turn(completion):
    return Turn(completion=completion, started_s=0.0, ended_s=1.0)


class Agent(Count):
    """Asks until it is refused, and then does what `after` says."""

    async def after(self, episode):
        return StopReason.COMPLETED

    async def play(self, episode):
        for _ in range(5):
            try:
                await episode.generate()
            except (EndpointError, ContextLengthError):
                return await self.after(episode)
            episode.add(Message(role="user", content="more"))
        return StopReason.COMPLETED


async def recorded(environment, policy, **particulars):
    client = InProcessEnvironment(environment, name="it")
    try:
        return await RecordedEnvironment(client).play(ask(**particulars), policy)
    finally:
        await client.close()


async def test_a_program_that_ends_when_its_history_is_too_long_is_scored():
    rollout = await recorded(Agent(), Recorded("one", "two", TOO_LONG[0]))
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 2.0)
    assert rollout.stop_reason is StopReason.CONTEXT_LENGTH


async def test_a_program_that_goes_on_with_a_shorter_history_has_reached_no_limit():
    class Compacts(Agent):
        async def after(self, episode):
            del episode.messages[1:]
            await episode.generate()
            return StopReason.COMPLETED

    rollout = await recorded(Compacts(), Recorded("one", TOO_LONG[0], "again"))
    assert (rollout.status, rollout.stop_reason) == (RolloutStatus.KEPT, StopReason.COMPLETED)
    assert len(rollout.turns) == 2


async def test_a_program_that_breaks_on_the_limit_is_not_played_again():
    class Breaks(Agent):
        async def after(self, episode):
            raise RuntimeError("the agent ended with exit code 1")

    asked = []

    async def once(attempt):
        asked.append(attempt)
        return await recorded(Breaks(), Recorded("one", TOO_LONG[0]))

    rollout = await play_with_attempts(once)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.stop_reason is StopReason.CONTEXT_LENGTH
    assert asked == [1]


async def test_a_program_whose_first_request_does_not_fit_fails():
    rollout = await recorded(Agent(), Recorded(TOO_LONG[0]))
    assert (rollout.status, rollout.status_reason) == (RolloutStatus.FAILED, "ContextLengthError")


async def test_a_deadline_after_a_failure_of_the_endpoint_is_no_limit_of_the_policy():
    class Waits(Agent):
        async def after(self, episode):
            await wait_for_ever()

    policy = Recorded("one", EndpointError("connection refused"))
    rollout = await recorded(Waits(), policy, deadline_s=60.0, scores_at_deadline=True)
    assert (rollout.status, rollout.stop_reason) == (RolloutStatus.FAILED, StopReason.TIMEOUT)
    assert "had failed: connection refused" in rollout.error


@pytest.mark.parametrize("trouble", ["", "answers 503: no capacity"])
async def test_a_deadline_is_a_limit_of_the_policy_only_if_it_was_asked_and_is_well(trouble):
    class Starts(Count):
        """Starts something slow before it asks for anything."""

        async def play(self, episode):
            if trouble:
                await episode.generate()
            await wait_for_ever()

    policy = Recorded("one", trouble=trouble)
    rollout = await recorded(Starts(), policy, deadline_s=60.0, scores_at_deadline=True)
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert rollout.stop_reason is StopReason.TIMEOUT
    assert (trouble or "before it asked the model for anything") in rollout.error
