"""Mistakes of new authors that show in play: each is one message with its cause and its place."""

from dataclasses import replace

import pytest
from tests.core.one_rollout import One, play

from telescope_core import (
    Example,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    SplitSource,
    metric,
    reward,
)
from telescope_core.errors import EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.playing.rollout import play_gold
from telescope_core.types import RolloutStatus, Split

HERE = "test_mistakes_in_play.py"


class Fine(One):
    @reward
    def right(self):
        return 1.0


class ClosesBadly(Fine):
    async def close(self):
        raise ValueError("no socket")


async def test_an_end_that_raises_loses_nothing_and_is_told(caplog):
    assert (await play(ClosesBadly())).reward == 1.0
    assert "ClosesBadly.close (" in caplog.text
    assert "raised ValueError: no socket" in caplog.text


class DrawsNothing(SingleTurnEnvironment):
    right = Fine.right

    def draw(self, random):
        Example(id="1", prompt="p")


class DrawsNumbers(SingleTurnEnvironment):
    right = Fine.right

    def draw(self, random):
        number = random.randrange(50)
        return Example(id=number, prompt=str(number), answer=number)


class KeysByNumber(SingleTurnEnvironment):
    right = Fine.right

    def examples(self, split):
        return SplitSource(
            lambda random: Example(id="1", prompt="p"), split=split, seed=0, split_key=lambda _: 3
        )


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (DrawsNothing, "what DrawsNothing.draw ({}:"),
        (DrawsNothing, ") returns must be an Example, got None"),
        (KeysByNumber, ") must return text, got 3 (int)"),
    ],
)
async def test_what_draw_returns_is_checked_with_its_place(cls, said):
    client = InProcessEnvironment(cls.from_settings({}), name="it")
    with pytest.raises(EnvironmentLoadError) as refused:
        await client.example(Split.EVAL, 0)
    await client.close()
    assert HERE in str(refused.value)
    for part in said.split("{}"):
        assert part in str(refused.value)
    assert "telescope_core/" not in str(refused.value)


async def test_numbers_as_ids_are_text_also_where_they_are_drawn():
    client = InProcessEnvironment(DrawsNumbers.from_settings({}), name="it")
    example = await client.example(Split.EVAL, 0)
    await client.close()
    assert example.id == example.prompt == example.answer


class TextSplits(Fine):
    def splits(self):
        return "eval"


class OtherSplits(Fine):
    def splits(self):
        return ("eval", "test")


class ListedRevisions(Fine):
    def dataset_revisions(self):
        return ["abc"]


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (TextSplits, ") must return a tuple of splits, such as (Split.TRAIN, Split.EVAL) or"),
        (OtherSplits, "got ('eval', 'test') (tuple)"),
        (ListedRevisions, ") must return a dict of texts by name, got ['abc'] (list)"),
    ],
)
async def test_what_an_environment_says_about_itself_is_checked(cls, said):
    client = InProcessEnvironment(cls.from_settings({}), name="it")
    with pytest.raises(EnvironmentLoadError) as refused:
        await client.describe()
    await client.close()
    assert said in str(refused.value)
    assert f"{cls.__name__}." in str(refused.value)
    assert HERE in str(refused.value)


async def test_splits_may_be_named_by_text():
    class Named(Fine):
        def splits(self):
            return ["eval"]

    client = InProcessEnvironment(Named.from_settings({}), name="it")
    assert [*(await client.describe()).num_examples] == [Split.EVAL]
    await client.close()


class GoldenRaises(Fine):
    def golden_answers(self, example):
        return {"answer": example.info["steps"]}


class GoldenList(Fine):
    def golden_answers(self, example):
        return [example.answer]


class NextOfNothing(Fine):
    def compute_reward(self, rollout, example):
        return float(next(word for word in rollout.completion_text.split() if word == "no"))


class Measures(Fine):
    value: object = None

    async def play(self, episode):
        await episode.generate()
        episode.metrics["depth"] = self.value


class MeasuresNan(Measures):
    value = float("nan")


class MeasuresHuge(Measures):
    value = 10**400


class ReplacesMetrics(Fine):
    async def play(self, episode):
        await episode.generate()
        episode.metrics = ["deep"]


class MeasuresLate(Fine):
    @metric
    def depth(self, rollout, example, episode):
        episode.metrics["late"] = float("nan")
        return 1


class PaysHuge(Fine):
    @reward
    def right(self):
        return 10**400


class NeverAsks(Fine):
    async def play(self, episode):
        episode.add("Are you there?")


class AddsText(MultiTurnEnvironment, Fine):
    def env_response(self, messages, episode):
        episode.messages.append("go on")
        return "go on"


class ReplacesMessages(Fine):
    async def play(self, episode):
        episode.messages = ["hi"]
        await episode.generate()


class LosesTurns(Fine):
    async def play(self, episode):
        await episode.generate()
        episode.turns = episode.messages = None


class NotesInWords(Fine):
    async def play(self, episode):
        await episode.generate()
        episode.info.append("well done")


class NotesJson(Fine):
    async def play(self, episode):
        await episode.generate()
        episode.note("out", {"a": 1}, kind="json")


class ScoresNothing(Fine):
    async def score(self, rollout, example, episode):
        return None


class ScoresInWords(Fine):
    async def score(self, rollout, example, episode):
        return replace(rollout, reward="1")


class Board:
    def __init__(self):
        self.size = {}["size"]


class StateRaises(Fine):
    State = Board


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (AddsText, "episode.messages, after AddsText.env_response ("),
        (AddsText, "), must be Message objects, got 'go on' (str)"),
        (ReplacesMessages, "episode.messages must be Message objects, got 'hi' (str)"),
        (LosesTurns, "LosesTurns.play ("),
        (NotesInWords, "episode.info holds what is no note; add notes with episode.note"),
        (NotesJson, "the kind of a note must be one of text, code, stdout, stderr, got 'json'"),
        (ScoresNothing, "must return the rollout with its reward, a finite number"),
        (ScoresInWords, "got a rollout with reward '1'"),
        (StateRaises, "KeyError: 'size' (in State of StateRaises ("),
        (GoldenRaises, "KeyError: 'steps' (in golden_answers GoldenRaises.golden_answers ("),
        (GoldenList, "GoldenList.golden_answers ("),
        (GoldenList, ") must return a dict of texts by name, got ['yes'] (list)"),
        (NextOfNothing, "StopIteration was raised ("),
        (NextOfNothing, "`next` was called on something empty"),
        (MeasuresNan, "episode.metrics['depth'] must be a finite number, got nan (float)"),
        (MeasuresHuge, "episode.metrics['depth'] must be a finite number, got 1000"),
        (ReplacesMetrics, "episode.metrics must be a dict of numbers, got ['deep'] (list)"),
        (MeasuresLate, "MeasuresLate.depth ("),
        (MeasuresLate, "episode.metrics['late'] must be a finite number, got nan (float)"),
        (PaysHuge, "must return a finite number, got 1000"),
        (NeverAsks, "NeverAsks.play ("),
        (NeverAsks, ") ended without asking the policy for anything"),
    ],
)
async def test_a_mistake_while_a_rollout_is_played_or_scored_names_its_place(cls, said):
    rollout = await play(cls.from_settings({}))
    assert (rollout.status, rollout.reward) == (RolloutStatus.FAILED, None)
    assert said in rollout.error
    assert f"{HERE}:" in rollout.error


class GoldNumber(Fine):
    def gold_answer(self, example):
        return 4


async def test_a_gold_answer_that_is_no_text_is_told():
    with pytest.raises(EnvironmentLoadError, match=r"gold_answer.*\b4\b"):
        await play_gold(GoldNumber.from_settings({}), "it", Split.EVAL, 0)
