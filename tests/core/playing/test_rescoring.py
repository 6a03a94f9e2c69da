"""Grading saved rollouts again: from the record, by playing them again, and what is left out."""

from dataclasses import replace

import pytest
from tests.asking import ask

from telescope_core import (
    Episode,
    Example,
    Message,
    MultiTurnEnvironment,
    RolloutStatus,
    SingleTurnEnvironment,
    StopReason,
    ToolEnvironment,
    cleanup,
    group_reward,
    metric,
    reward,
    runs_in,
    setup,
    tool,
)
from telescope_core.base.protocols import LEFT_OUT, RAISED
from telescope_core.errors import NotAskedError, TelescopeError
from telescope_core.evals.rescoring import ExampleFinder, grade_again
from telescope_core.in_process import InProcessEnvironment
from telescope_core.judge import Judge, JudgeConfig
from telescope_core.records.rows import row_of, turns_in
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Group, Split, ToolCall

ROWS = [Example(id="one", prompt="2 + 2?", answer="4")]
ONE = {"train": ROWS, "eval": [Example(id="two", prompt="1 + 1?", answer="2")]}


def client_of(environment, *, asks_models=False):
    return InProcessEnvironment(environment, name="it", asks_models=asks_models)


async def played(environment, *replies):
    """Return a rollout of `environment`, as a run records it."""
    client = client_of(environment, asks_models=True)
    rollout = await client.play(ask(), ScriptedClient(list(replies)).policy("r"))
    await client.close()
    return rollout


async def rescored(environment, saved, **options):
    client = client_of(environment, **options)
    try:
        return await client.play(ask(saved=saved), ScriptedClient([]).policy("nobody"))
    finally:
        await client.close()


class Sum(SingleTurnEnvironment):
    data = ONE

    @reward
    def correct(self, completion, answer):
        return float(completion == answer)


class SumMended(Sum):
    @reward
    def correct(self, completion, answer):
        return float(completion.strip() == answer)

    @metric
    def length(self, rollout):
        return len(rollout.completion_text)


async def test_another_version_grades_what_was_saved():
    saved = await played(Sum(), " 4")
    assert saved.reward == 0
    again = await rescored(SumMended(), saved)
    assert (again.reward, again.rewards, again.metrics["length"]) == (1, {"correct": 1}, 2)
    assert (await rescored(Sum(), saved)).reward == 0


class Crashes(Sum):
    @reward(weight=0.5)
    def correct(self, completion, answer):
        return float(completion == answer)

    @reward(weight=0.5)
    def short(self, completion):
        return 1 / len(completion)


async def test_a_part_that_raises_is_named_and_the_others_are_graded():
    saved = replace(await played(Sum(), "4"), messages=(Message(role="assistant", content=""),))
    again = await rescored(Crashes(), saved)
    assert (again.status, again.reward, again.rewards) == (
        RolloutStatus.FAILED,
        None,
        {"correct": 0},
    )
    assert "ZeroDivisionError" in again.tags[f"{RAISED}short"]
    assert "short" in again.error


class Outside(Sum):
    reward_max = success_threshold = 0.5


async def test_a_reward_outside_its_range_fails_without_a_part():
    again = await rescored(Outside(), await played(Sum(), "4"))
    assert again.status is RolloutStatus.FAILED
    assert again.status_reason == "UnplayableError"
    assert again.rewards == {"correct": 1}
    assert not [name for name in again.tags if name.startswith((LEFT_OUT, RAISED))]


class Guess(MultiTurnEnvironment):
    """What was guessed is in the state alone."""

    data = ONE
    max_turns = 3
    log = ()

    def __init__(self, config=None):
        super().__init__(config)
        self.calls = []

    @setup
    def begin(self, episode):
        self.calls.append("setup")
        episode.state["guesses"] = []

    @cleanup
    def end(self, episode):
        episode.state["guesses"].append("end")
        self.calls.append("cleanup")

    def env_response(self, messages, episode):
        guess = messages[-1].content
        episode.state["guesses"].append(guess)
        return None if guess == episode.example.answer else f"not {guess}"

    @reward
    def found(self, episode, answer):
        return float(answer in episode.state["guesses"])


class GuessEarly(Guess):
    """Only the first two guesses count."""

    @reward
    def found(self, state, answer):
        return float(answer in state["guesses"][:2])

    @metric
    def words(self, rollout):
        return len(rollout.completion_text)


async def test_a_state_is_made_again_by_playing_the_saved_turns():
    saved = await played(Guess(), "1", "2", "4")
    assert (saved.reward, len(saved.turns)) == (1, 3)
    environment = GuessEarly()
    again = await rescored(environment, saved)
    assert (again.reward, again.rewards) == (0, {"found": 0})
    assert environment.calls == ["setup", "cleanup"]
    assert (await rescored(Guess(), saved)).reward == 1


class GuessTold(GuessEarly):
    def env_response(self, messages, episode):
        told = super().env_response(messages, episode)
        return told and told.upper()


class GuessFewer(GuessEarly):
    max_turns = 2


class GuessCrashes(GuessEarly):
    def env_response(self, messages, episode):
        raise OSError("no such tool")


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (GuessTold, "something else after turn 1"),
        (GuessFewer, "2 turns, and 3 in the record"),
        (GuessCrashes, "OSError: no such tool"),
    ],
)
async def test_what_plays_otherwise_is_left_out_by_name(environment, why):
    """The rest is graded, and what was begun for the other play has ended."""
    saved = await played(Guess(), "1", "2", "4")
    one = environment()
    again = await rescored(one, saved)
    assert (again.reward, again.rewards, again.metrics["words"]) == (None, {}, 1)
    assert why in again.tags[f"{LEFT_OUT}found"]
    assert one.calls == ["setup", "cleanup"]


class GuessOnline(GuessEarly):
    network = "always"


async def test_nothing_is_played_again_over_the_network():
    one = GuessOnline()
    again = await rescored(one, await played(Guess(), "1", "4"))
    assert "network" in again.tags[f"{LEFT_OUT}found"]
    assert one.calls == []


class GuessSaid(GuessOnline):
    """The reward reads the record, and only a metric the state."""

    @reward
    def found(self, completion, answer):
        return float(completion == answer)

    @metric
    def guesses(self, state):
        return len(state["guesses"])


async def test_a_metric_that_is_left_out_leaves_the_reward():
    again = await rescored(GuessSaid(), await played(Guess(), "1", "4"))
    assert (again.status, again.reward) == (RolloutStatus.KEPT, 1)
    assert f"{LEFT_OUT}metric guesses" in again.tags
    assert "guesses" not in again.metrics


class Add(ToolEnvironment):
    data = ONE

    @tool
    def add(self, a: int, b: int, episode: Episode) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        episode.state["sum"] = a + b
        return a + b

    @reward
    def used(self, state, answer):
        return float(str(state.get("sum")) == answer)


async def test_tools_are_called_again():
    call = ToolCall(id="c", name="add", arguments='{"a": 2, "b": 2}')
    asked = Message(role="assistant", content="", tool_calls=(call,))
    calls = Completion(message=asked, finish_reason="tool_calls")
    saved = await played(Add(), calls, "4")
    assert (saved.reward, len(saved.turns), saved.error) == (1, 2, None)
    assert (await rescored(Add(), saved)).reward == 1


class Judged(Sum):
    def __init__(self, config=None):
        super().__init__(config)
        self.judge = Judge(JudgeConfig(), self)

    @reward(weight=0.5)
    def correct(self, completion, answer):
        return float(completion == answer)

    @reward(weight=0.5)
    async def nice(self, rollout, example):
        try:
            return (await self.judge.score(rollout, example, rubric="nice")).score
        except TelescopeError:
            return 0.0


class JudgedElsewhere(Judged):
    @reward(weight=0.5)
    @runs_in("process")
    async def nice(self, rollout, example):
        return (await self.judge.score(rollout, example, rubric="nice")).score


class JudgedGroups(Judged):
    @reward(weight=0.5)
    def nice(self):
        return 1.0

    @group_reward(weight=0.0)
    async def best(self, rollouts, example):
        found = await self.judge.score(rollouts[0], example, rubric="best")
        return [found.score for _ in rollouts]


@pytest.mark.parametrize(
    "environment", [Judged, pytest.param(JudgedElsewhere, marks=pytest.mark.slow)]
)
async def test_a_judge_is_not_asked_even_by_code_that_would_give_nothing(environment):
    again = await rescored(environment(), await played(Sum(), "4"))
    assert (again.reward, again.rewards) == (None, {"correct": 1})
    assert "asks a judge" in again.tags[f"{LEFT_OUT}nice"]


@pytest.mark.slow
async def test_a_judge_is_asked_where_it_may_be():
    """This one has no address, which it says once it is asked."""
    again = await rescored(JudgedElsewhere(), await played(Sum(), "4"), asks_models=True)
    assert "base_url" in again.tags[f"{RAISED}nice"]
    assert not [name for name in again.tags if name.startswith(LEFT_OUT)]


class Counted(Sum):
    """Each grade of its judge costs money, and its other part may raise."""

    num_asked = 0

    @reward(weight=0.5)
    async def nice(self):
        self.num_asked += 1
        return 1.0

    @reward(weight=0.5)
    def correct(self, completion, answer):
        return float(int(completion) == int(answer))

    def golden_answers(self, example):
        return {"sum": example.answer}


@pytest.mark.parametrize(("answer", "whole"), [("4", 1.0), ("four", None)])
async def test_where_judges_are_asked_each_part_is_evaluated_once(answer, whole):
    environment = Counted()
    again = await rescored(environment, await played(Sum(), answer), asks_models=True)
    assert (again.reward, again.rewards["nice"], environment.num_asked) == (whole, 1.0, 1)
    assert (f"{RAISED}correct" in again.tags) == (whole is None)
    assert again.golden_answers == ({"sum": "4"} if whole else {})


async def test_a_group_reward_asks_no_judge():
    client = client_of(JudgedGroups())
    saved = await rescored(JudgedGroups(), await played(Sum(), "4"))
    group = Group(id="g", environment="it", example_id="one", rollouts=(saved,))
    with pytest.raises(NotAskedError, match="judge"):
        await client.score_group(Split.TRAIN, 0, group)
    await client.close()


async def test_a_rollout_that_was_cut_ends_where_it_was_cut():
    saved = await played(Guess(), "1", "2", "3")
    cut = replace(
        saved,
        messages=saved.messages[:3],
        turns=saved.turns[:1],
        stop_reason=StopReason.CONTEXT_LENGTH,
    )
    again = await rescored(Guess(), cut)
    assert (again.reward, again.stop_reason) == (0, StopReason.CONTEXT_LENGTH)


def test_the_last_answers_are_those_of_the_policy():
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant"]
    messages = [Message(role=role, content="") for role in roles]
    assert turns_in(messages, 2) == [3, 5]
    assert turns_in(messages, 0) == []
    assert turns_in(messages, 4) is None
    assert turns_in(messages, 3) == [1, 3, 5]


class OlderWorker(InProcessEnvironment):
    """One that knows of no saved rollouts, and leaves the field out."""

    async def play(self, request, policy):
        return await super().play(replace(request, saved=None), policy)


async def test_an_older_worker_is_told_as_such_and_asks_no_model():
    row = row_of(await played(Sum(), "4"))
    found = []
    client = OlderWorker(Sum(), name="it")
    await grade_again(
        client,
        [[row]],
        split=Split.TRAIN,
        deadline_s=10.0,
        concurrency=4,
        most_examples=9,
        on_graded=found.extend,
    )
    await client.close()
    assert found[0].reward is None
    assert "install or link it again" in found[0].error


class Numbers:
    """Examples of a split that begins again after the tenth."""

    def __init__(self):
        self.num_read = 0

    async def example(self, split, index):
        self.num_read += 1
        return Example(id=str(index % 10), prompt="")


async def test_examples_are_found_wherever_they_are_and_read_once():
    numbers = Numbers()
    finder = ExampleFinder(numbers, Split.TRAIN, None, most=5000)
    assert [await finder.index_of(one) for one in ("7", "0", "11")] == [7, 0, None]
    assert await finder.index_of("12") is None
    assert numbers.num_read < 2200
    few = ExampleFinder(numbers, Split.TRAIN, None, most=5)
    assert [await few.index_of(one) for one in ("4", "5")] == [4, None]
    few = ExampleFinder(Numbers(), Split.TRAIN, 3, most=5000)
    assert [await few.index_of(one) for one in ("2", "3")] == [2, None]


class SumOfText(Sum):
    def examples(self, split):
        return [replace(one, cluster="text 7") for one in ONE[split]]


async def test_the_cluster_is_that_of_the_version_that_grades():
    saved = await played(Sum(), "4")
    assert (await rescored(SumOfText(), saved)).tags["cluster"] == "text 7"


class ReadsDigits(Sum):
    @reward
    def correct(self, rollout, example, episode):
        if rollout.completion_text.isdigit():
            episode.tags["answer"] = rollout.completion_text
        return float(rollout.completion_text == example.answer)


async def test_an_answer_that_another_grader_read_is_no_vote():
    saved = await played(ReadsDigits(), "4")
    assert saved.tags["answer"] == "4"
    assert (await rescored(ReadsDigits(), saved)).tags["answer"] == "4"
    assert "answer" not in (await rescored(Sum(), saved)).tags


class WithOneUnreadable:
    """A source of three examples, of which the code of the first fails."""

    num_examples = 3

    def example(self, index):
        if index == 0:
            raise ValueError("the file of the first is gone")
        return ROWS[0] if index == 1 else Example(id="third", prompt="3 + 3?", answer="6")


FILES = {"train": WithOneUnreadable(), "eval": ONE["eval"]}


class SumOfFiles(Sum):
    data = FILES


async def graded_again(environment, groups, concurrency=4):
    found = []
    client = client_of(environment)
    await grade_again(
        client,
        groups,
        split=Split.TRAIN,
        deadline_s=10.0,
        concurrency=concurrency,
        most_examples=9,
        on_graded=found.extend,
    )
    await client.close()
    return found


async def test_an_example_that_cannot_be_read_costs_its_own_rollouts_only():
    row = row_of(await played(Sum(), "4"))
    gone = replace(row, group_id="other", example_id="zero")
    found = await graded_again(SumOfFiles(), [[row], [gone]])
    assert {one.row.example_id: one.reward for one in found} == {"one": 1.0, "zero": None}
    (missing,) = (one for one in found if one.why_not)
    assert "not in the train split, or is one of those that cannot be read" in missing.why_not
    assert "(1 of its examples; EnvironmentLoadError: example 0 of" in missing.why_not
    assert "the file of the first is gone" in missing.why_not


async def test_groups_are_read_when_there_is_room_for_them():
    row = row_of(await played(Sum(), "4"))
    num_read = num_graded = 0
    held = []

    def groups():
        nonlocal num_read
        for number in range(40):
            num_read += 2
            yield [replace(row, group_id=str(number), index=index) for index in range(2)]

    class Counting(Sum):
        @reward
        def correct(self):
            nonlocal num_graded
            held.append(num_read - num_graded)
            num_graded += 1
            return 1.0

    found = await graded_again(Counting(), groups(), concurrency=4)
    assert [one.reward for one in found] == [1.0] * 80
    assert max(held) <= 4 + 2, "those that are graded, and the group that is next"
