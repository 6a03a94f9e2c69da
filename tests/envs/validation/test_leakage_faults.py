"""Planted faults of the leakage level: what is shown, tools, cleanups, what stays behind."""

import datetime
import ipaddress
import json
import uuid
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import UUID4, AnyUrl, Field, HttpUrl, SecretStr, TypeAdapter, WithJsonSchema

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
from telescope_core.probes.schema_check import NoExampleError, example_of
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


Code = Annotated[str, Field(pattern="^[A-Z]{2}-[0-9]+$")]


class TakesTextsOfAForm(Tools):
    @tool
    def book(
        self,
        day: datetime.date,
        code: Annotated[Code, Field(examples=["AB-12"])],
        other: Code | None,
    ) -> str:
        """Book a day.

        Args:
            day: The day.
            code: What to book.
            other: What to book if that is gone.
        """
        return f"{day:%A} {code} {other}"


class TakesAPattern(Tools):
    @tool
    def book(self, code: Code) -> str:
        """Book something.

        Args:
            code: What to book.
        """
        return code


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


class SpeaksAfterATurnWithoutACall(RefusesWhatItsSchemaAllows):
    max_turns = 3

    async def env_response(self, messages, episode):
        if not messages[-1].tool_calls:
            return "Please use a tool."
        return await super().env_response(messages, episode)


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


@pytest.mark.parametrize(
    "made",
    [
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID, UUID4),
        *(AnyUrl, HttpUrl, ipaddress.IPv4Address, ipaddress.IPv6Address, SecretStr, Path, bytes),
        Annotated[str, Field(pattern=r"^\w+$")],
        Annotated[str, Field(pattern="^[0-9]$", examples=["7"])],
        Annotated[str, Field(pattern="^[0-9]$")] | int,
    ],
)
def test_a_value_that_is_made_of_a_schema_fits_it(made):
    adapter = TypeAdapter(made)
    adapter.validate_json(json.dumps(example_of(adapter.json_schema())))


@pytest.mark.parametrize(
    "about",
    [{"pattern": "^[0-9]$"}, {"pattern": "^(?>a)["}, {"format": "iban"}],
)
def test_a_text_of_an_unknown_form_is_not_made_up(about):
    schema = {"type": "object", "properties": {"it": {"type": "string", **about}}}
    with pytest.raises(NoExampleError):
        example_of({**schema, "required": ["it"]})
    assert example_of(schema) == {}


def test_a_tool_is_not_called_with_a_text_that_nobody_could_make(try_out):
    check = try_out("leakage", TakesAPattern).results["leakage.tools"]
    assert check.outcome is Outcome.INCONCLUSIVE
    assert "tool book was not called" in check.reason
    assert "Field(examples=[...])" in check.reason


def test_the_answer_to_a_call_is_shown_and_not_what_was_said_later(try_out):
    told = try_out("leakage", SpeaksAfterATurnWithoutACall).evidence("leakage.tools").text
    assert "wrong arguments for look_up" in told
    assert "Field(examples=[...])" in told
    assert "Please use a tool" not in told


@pytest.mark.parametrize("clean", [Sums, Tools, TakesTextsOfAForm, CleansUpTwice])
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
