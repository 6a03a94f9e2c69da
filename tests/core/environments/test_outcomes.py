"""What `play`, `@stop` and `generate` may be, and how a mistake in them is told."""

import pytest
from tests.core.one_rollout import play

from telescope_core import (
    Completion,
    Environment,
    Example,
    Message,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    StopReason,
    reward,
    stop,
)
from telescope_core.environments.outcomes import finite
from telescope_core.types import RolloutStatus


class Asks(Environment):
    def examples(self, split):
        return [Example(id="e", prompt="p")]

    @reward
    def turns(self, rollout):
        return len(rollout.turns)


class ReturnsNothing(Asks):
    async def play(self, episode):
        await episode.generate()


class ReturnsText(Asks):
    async def play(self, episode):
        await episode.generate()
        return "completed"


CUT = Completion(message=Message(role="assistant", content="y"), finish_reason="length")


async def test_play_need_not_return_a_stop_reason():
    assert (await play(ReturnsNothing())).stop_reason is StopReason.COMPLETED
    assert (await play(ReturnsNothing(), [CUT])).stop_reason is StopReason.LENGTH
    assert (await play(ReturnsText())).stop_reason is StopReason.COMPLETED


class ReturnsANumber(Asks):
    async def play(self, episode):
        await episode.generate()
        return 1


class PlaysSync(Asks):
    def play(self, episode):
        episode.generate()
        return StopReason.COMPLETED


class PlaysYielding(Asks):
    async def play(self, episode):
        yield await episode.generate()


class NeverAwaits(Asks):
    async def play(self, episode):
        episode.generate()
        return StopReason.COMPLETED


class ReadsWhatItNeverAwaited(Asks):
    async def play(self, episode):
        completion = episode.generate()
        return completion.finish_reason


class AddsANumber(Asks):
    async def play(self, episode):
        await episode.generate()
        episode.add(7)


class CountsInWords(Asks):
    async def play(self, episode):
        await episode.generate()
        episode.metrics["depth"] = "deep"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            ReturnsANumber,
            "must return a StopReason such as StopReason.COMPLETED, or nothing, got 1",
        ),
        (PlaysSync, "must be a coroutine, because it waits for the policy; write `async def play"),
        (PlaysYielding, "must be a coroutine"),
        (NeverAwaits, "generate() was called without await at "),
        (ReadsWhatItNeverAwaited, "generate() was called without await at "),
        (AddsANumber, "the arguments of episode.add must be Message objects, got 7 (int)"),
        (CountsInWords, "episode.metrics['depth'] must be a finite number, got 'deep' (str)"),
    ],
)
async def test_a_mistake_in_play_fails_the_rollout_with_its_name_and_place(environment, said):
    rollout = await play(environment())
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert said in rollout.error
    assert environment.__name__ in rollout.error
    assert "test_outcomes.py:" in rollout.error


async def test_the_line_of_a_forgotten_await_is_named():
    line = NeverAwaits.play.__code__.co_firstlineno + 1
    rollout = await play(NeverAwaits())
    assert rollout.status is RolloutStatus.FAILED
    assert f"test_outcomes.py:{line}" in rollout.error


def stops_with(value):
    class Stops(MultiTurnEnvironment):
        examples = Asks.examples
        turns = Asks.turns
        max_turns = 3
        reward_max = 3.0

        def env_response(self, messages, episode):
            return "go on"

        @stop
        def done(self, episode):
            return value

    return Stops()


class LikeNumpy:
    def item(self):
        return True


@pytest.mark.parametrize(("value", "turns"), [(True, 1), (False, 3), (None, 3), (LikeNumpy(), 1)])
async def test_a_stop_method_says_yes_or_no(value, turns):
    rollout = await play(stops_with(value))
    assert (rollout.error, len(rollout.turns)) == (None, turns)


class Array(LikeNumpy):
    """An array with one element, of which numpy makes a number with a warning at most."""

    ndim = 1

    def __float__(self):
        return 1.0

    def __repr__(self):
        return "array([1.])"


def test_an_array_of_one_is_no_number():
    assert finite(Array()) is None


@pytest.mark.parametrize("value", ["no", 0, [], "yes", Array()])
async def test_a_stop_method_that_says_anything_else_fails_the_rollout(value):
    rollout = await play(stops_with(value))
    assert rollout.reward is None
    assert f"must return True or False, got {value!r}" in rollout.error


async def test_text_that_is_added_is_a_user_message():
    class Sure(Asks):
        reward_max = 2.0

        async def play(self, episode):
            await episode.generate()
            episode.add("Sure?")
            await episode.generate()

    rollout = await play(Sure())
    added = rollout.messages[2]
    assert (added.role, added.content) == ("user", "Sure?")


async def test_a_reward_may_return_what_another_coroutine_promised():
    class Passes(SingleTurnEnvironment):
        examples = Asks.examples

        async def grade(self, completion):
            return 0.5

        @reward
        def quality(self, completion):
            return self.grade(completion)

    assert (await play(Passes())).reward == 0.5


async def test_tags_and_notes_are_kept_as_text():
    class Notes(ReturnsNothing):
        async def play(self, episode):
            await episode.generate()
            episode.tags["level"] = 3
            episode.note("distance", 4)

    rollout = await play(Notes())
    assert (rollout.error, dict(rollout.tags), rollout.info[0].value) == (None, {"level": "3"}, "4")
