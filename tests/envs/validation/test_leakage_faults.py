"""Planted faults of the leakage level: what is shown, tools, cleanups, what stays behind."""

from typing import Annotated

import pytest
from pydantic import Field, WithJsonSchema

from telescope_core import (
    Example,
    ListSource,
    MultiTurnEnvironment,
    SingleTurnEnvironment,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.environments import ToolError, cleanup, setup
from telescope_envs.validation import Outcome


class Sums(SingleTurnEnvironment):
    """Nothing is wrong with it."""

    def examples(self, split):
        first = 100 if split == "train" else 500
        pairs = [(first + 7 * i, 13 * i + 11) for i in range(12)]
        return ListSource(
            [Example(id=f"{a}+{b}", prompt=f"{a} + {b} = ?", answer=str(a + b)) for a, b in pairs]
        )

    def gold_answer(self, example):
        return example.answer

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text.strip() == example.answer)


class Tools(ToolEnvironment):
    """Neither here."""

    examples = Sums.examples
    gold_answer = Sums.gold_answer
    correct = Sums.correct

    @tool
    def add(self, left: int, right: Annotated[int, Field(ge=3, le=9)], note: str = "") -> int:
        """Add two numbers.

        Args:
            left: The first one.
            right: The second one.
            note: What it is for.
        """
        if left == 0:
            raise ToolError("nothing to add")
        return left + right


class TellsInThePrompt(Sums):
    def format_prompt(self, example):
        return f"{example.prompt} (it is {example.answer})"


class TellsInTheSystemPrompt(Sums):
    def opening(self, prompt):
        a, b = map(int, str(prompt).removesuffix(" = ?").split(" + "))
        self.system_prompt = f"You know that the sum is {a + b}"
        return super().opening(prompt)


class TellsInTheFirstObservation(MultiTurnEnvironment):
    examples = Sums.examples
    gold_answer = Sums.gold_answer
    correct = Sums.correct

    def env_response(self, messages, episode):
        right = messages[-1].content == episode.example.answer
        return None if right else f"Wrong, the answer is {episode.example.answer}. Again!"


class HasASchemaOfItsOwn(Tools):
    @tool
    def look_up(self, word: Annotated[str, WithJsonSchema({"type": "text"})]) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word


class HasAToolThatRaises(Tools):
    @tool
    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return {}[word]


class RefusesWhatItsSchemaAllows(Tools):
    @tool
    def look_up(self, word: Annotated[str, WithJsonSchema({"type": "integer"})]) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return word


class FailsForWrongCalls(Tools):
    async def env_response(self, messages, episode):
        for call in messages[-1].tool_calls:
            getattr(self, call.name)
        return await super().env_response(messages, episode)


class CleansUpOnce(Sums):
    @setup
    def open_it(self, episode):
        episode.state["open"] = True

    @cleanup
    def close_it(self, episode):
        del episode.state["open"]


class CannotCleanUpWhatWasCancelled(Sums):
    @cleanup
    def close_it(self, episode):
        assert episode.turns, "there was no turn"


class CleansUpTwice(Sums):
    @cleanup
    def close_it(self, episode):
        episode.state.pop("open", None)


class CountsItsRollouts(MultiTurnEnvironment):
    examples = Sums.examples
    correct = Sums.correct
    max_turns = 3

    def __init__(self, config=None):
        super().__init__(config)
        self.num_played = 0

    def env_response(self, messages, episode):
        self.num_played += 1
        return f"This is turn {self.num_played}."


class KeepsEpisodes(Sums):
    def __init__(self, config=None):
        super().__init__(config)
        self.kept = []

    @setup
    def remember(self, episode):
        self.kept.append(episode)


FAULTS = {
    TellsInThePrompt: "leakage.prompt",
    TellsInTheSystemPrompt: "leakage.prompt",
    TellsInTheFirstObservation: "leakage.prompt",
    HasASchemaOfItsOwn: "leakage.tools",
    HasAToolThatRaises: "leakage.tools",
    RefusesWhatItsSchemaAllows: "leakage.tools",
    FailsForWrongCalls: "leakage.tools",
    CleansUpOnce: "leakage.cleanup",
    CannotCleanUpWhatWasCancelled: "leakage.cleanup",
    CountsItsRollouts: "leakage.isolation",
    KeepsEpisodes: "leakage.memory",
}


SAID = {
    HasASchemaOfItsOwn: "'text' is not one of",
    HasAToolThatRaises: "raised",
    RefusesWhatItsSchemaAllows: "bad_arguments",
    FailsForWrongCalls: "no_such_tool_here",
}
"""What tells faults apart that one check finds."""


@pytest.mark.parametrize("clean", [Sums, Tools, CleansUpTwice])
def test_a_clean_environment_has_no_findings(try_out, clean):
    tried = try_out("leakage", clean)
    assert tried.found == []
    not_run = {Outcome.NOT_RUN}
    assert [n for n, c in tried.results.items() if "leakage." in n and c.outcome in not_run] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_planted_fault_is_found_by_its_check(try_out, fault):
    tried = try_out("leakage", fault)
    assert tried.found == [FAULTS[fault]]
    assert SAID.get(fault, "") in tried.evidence(FAULTS[fault]).text
