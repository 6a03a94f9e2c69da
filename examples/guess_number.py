"""Guess a number: an example of an environment with several turns.

Try it with `telescope eval examples/guess_number.py:GuessNumber --base-url ...`.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from telescope_core import (
    EnvironmentConfig,
    Example,
    MultiTurnEnvironment,
    group_reward,
    metric,
    reward,
    stop,
)
from telescope_core.parsers import xml_tag


@dataclass
class Game:
    """What happened so far."""

    guesses: list[int] = field(default_factory=list)


class GuessNumber(MultiTurnEnvironment):
    """Find a number; after each guess the environment says whether it is higher or lower."""

    max_turns = 12
    reward_max = 1.2
    State = Game
    system_prompt = "Answer with <guess>NUMBER</guess> and nothing else."

    class Config(EnvironmentConfig):
        largest: Annotated[int, Field(ge=2, le=1000)] = 100
        """The number is one of 1 .. largest."""

    def draw(self, random):
        number = str(random.randint(1, self.config.largest))
        return Example(id=number, prompt=f"1 to {self.config.largest}.", answer=number)

    def env_response(self, messages, episode):
        guess = xml_tag(messages[-1].content, "guess") or ""
        if not guess.isdecimal():
            return "That is no guess. Write <guess>NUMBER</guess>."
        episode.state.guesses.append(int(guess))
        episode.note("distance", str(abs(int(guess) - int(episode.example.answer))))
        return "Higher." if int(guess) < int(episode.example.answer) else "Lower."

    @stop
    def found(self, episode):
        return xml_tag(episode.messages[-1].content, "guess") == episode.example.answer

    @reward
    def correct(self, completion, answer):
        return xml_tag(completion, "guess") == answer

    @group_reward(weight=0.2)
    def fastest(self, rollouts, example):
        turns = [len(r.turns) if r.rewards["correct"] else self.max_turns + 1 for r in rollouts]
        return [float(n == min(turns) <= self.max_turns) for n in turns]

    @metric(low=0, lower_is_better=True)
    def repeated(self, episode):
        guesses = episode.state.guesses
        return len(guesses) - len(set(guesses))

    def gold_answer(self, example):
        low, high, middle, replies = 1, self.config.largest, 0, []
        while middle != int(example.answer):
            middle = (low + high) // 2
            replies.append(f"<guess>{middle}</guess>")
            low, high = (middle + 1, high) if middle < int(example.answer) else (low, middle - 1)
        return replies
