"""Planted faults of the load level that one process shows: ids, splits, settings, tools."""

from dataclasses import replace

import pytest

from telescope_core import (
    EnvironmentConfig,
    Example,
    ListSource,
    SingleTurnEnvironment,
    SplitSource,
    ToolEnvironment,
    reward,
    tool,
)


class Words(SingleTurnEnvironment):
    """Nothing is wrong with it."""

    def examples(self, split):
        return ListSource(
            [
                Example(id=f"{split}-{i}", prompt=f"Say {split} {i}", answer=f"{split} {i}")
                for i in range(5)
            ]
        )

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.answer)


class HasOneIdTwice(Words):
    def examples(self, split):
        return ListSource(
            [Example(id=f"{split}-{i % 4}", prompt=f"{split} {i}", answer="a") for i in range(5)]
        )


class HasIdsInBothSplits(Words):
    def examples(self, split):
        return ListSource(
            [Example(id=str(i), prompt=f"{split} {i}", answer=f"{i}") for i in range(5)]
        )


class HasProblemsInBothSplits(Words):
    def examples(self, split):
        return ListSource(
            [Example(id=f"{split}-{i}", prompt=f"Say {i}", answer=str(i)) for i in range(5)]
        )


class HasNoExamples(Words):
    def examples(self, split):
        return ListSource([])


class HasAPromptOfNothing(Words):
    def examples(self, split):
        return ListSource([Example(id=f"{split}-0", prompt="")])


class HasNoEnd(Words):
    def examples(self, split):
        class Source(ListSource):
            def example(self, index):
                return super().example(index % 3)

        prompts = [Example(id=f"{split}-{i}", prompt=f"{split} {i}") for i in range(3)]
        return Source(prompts)


class NeedsASetting(Words):
    class Config(EnvironmentConfig):
        """One setting without a default."""

        path: str


class HasNoRange(Words):
    reward_min = 1.0


class SucceedsBelowItsRange(Words):
    success_threshold = 0.0


class FollowsABranch(Words):
    def dataset_revisions(self):
        return {"acme/words": "main"}


class HasAToolWithoutTypes(ToolEnvironment):
    examples = Words.examples
    correct = Words.correct

    @tool
    def look_up(self, word):
        """Look a word up."""
        return word


FAULTS = {
    HasOneIdTwice: "load.ids",
    HasIdsInBothSplits: "load.splits",
    HasProblemsInBothSplits: "load.splits",
    HasNoExamples: "load.examples",
    HasAPromptOfNothing: "load.examples",
    HasNoEnd: "load.examples",
    NeedsASetting: "load.settings",
    HasNoRange: "load.declarations",
    SucceedsBelowItsRange: "load.declarations",
    FollowsABranch: "load.datasets",
    HasAToolWithoutTypes: "load.tools",
}


def test_a_clean_environment_has_no_findings(try_out):
    assert try_out("load", Words).found == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_planted_fault_is_found_by_its_check(try_out, fault):
    assert try_out("load", fault).found == [FAULTS[fault]]


@pytest.mark.slow
def test_an_endless_source_may_begin_again(try_out):
    class Few(Words):
        def examples(self, split):
            def draw(rng):
                number = rng.randint(0, 30)
                return Example(id=str(number), prompt=f"Say {number}", answer=str(number))

            return SplitSource(draw, split=split, seed=0, eval_share=0.5)

    assert try_out("load", Few).found == []


def test_a_constant_prompt_is_no_overlap_when_the_answers_differ(try_out):
    class Hidden(Words):
        def examples(self, split):
            words = ["apple", "bread"] if split == "train" else ["cedar", "daisy"]
            return ListSource([Example(id=w, prompt="Guess the word", answer=w) for w in words])

    assert try_out("load", Hidden).found == []


def mazes(split, *, answer=""):
    """Two games with one prompt, whose maps nobody sees."""
    first = 0 if split == "train" else 2
    return ListSource(
        [
            Example(id=f"maze-{i}", prompt="Find the way out", answer=answer, info={"seed": i})
            for i in (first, first + 1)
        ]
    )


@pytest.mark.parametrize("answer", ["", "out"])
def test_games_with_one_prompt_and_other_hidden_state_are_no_overlap(try_out, answer):
    class Maze(Words):
        def examples(self, split):
            return mazes(split, answer=answer)

        def gold_answer(self, example):
            return ["north", "out"]

    assert try_out("load", Maze).found == []


def test_the_same_hidden_state_in_two_splits_is_found(try_out):
    class Maze(Words):
        def examples(self, split):
            drawn = [mazes("train").example(i) for i in range(2)]
            return ListSource([replace(one, id=f"{split}-{one.id}") for one in drawn])

    try_out("load", Maze).require_only_failure("load.splits")


def test_a_question_in_both_splits_is_found_though_its_info_differs(try_out):
    class Rows(Words):
        def examples(self, split):
            row = 1 if split == "train" else 9
            asked = Example(id=f"row-{row}", prompt="2 + 2 = ?", answer="4", info={"row": row})
            return ListSource([asked])

    try_out("load", Rows).require_only_failure("load.splits")


def test_evidence_says_how_many_and_which(try_out):
    evidence = try_out("load", HasIdsInBothSplits).evidence("load.splits")
    assert evidence.text.startswith("the ids of 5 of 10 examples are in two splits")
    assert evidence.example_id == "0"
    evidence = try_out("load", HasProblemsInBothSplits).evidence("load.splits")
    assert evidence.text.startswith("the problems of 5 of 10 examples are in two splits")


class GivesAList(Words):
    def examples(self, split):
        return [Example(id=f"{split}-{i}", prompt=f"Say {split} {i}", answer="a") for i in range(5)]


class HasData(Words):
    """Examples that a class variable gives, divided over the splits."""

    examples = SingleTurnEnvironment.examples
    data = tuple({"prompt": f"Say {i}", "answer": str(i)} for i in range(20))


class DrawsItsExamples(Words):
    examples = SingleTurnEnvironment.examples

    def draw(self, random):
        number = random.randrange(10**6)
        return Example(id=str(number), prompt=f"Say {number}", answer=str(number))


@pytest.mark.parametrize("environment", [GivesAList, HasData, DrawsItsExamples])
def test_every_form_of_examples_is_read(try_out, environment):
    tried = try_out("load", environment)
    assert tried.found == []
    assert tried.facts["examples_train"]


class HasARowTwice(Words):
    def examples(self, split):
        return [Example(id="a", prompt=f"{split} {i}", answer="a") for i in range(2)]


def test_an_id_that_comes_twice_in_a_list_is_found(try_out):
    tried = try_out("load", HasARowTwice)
    assert "load.examples" in tried.found
    assert "same id" in str(tried.evidence("load.examples"))
