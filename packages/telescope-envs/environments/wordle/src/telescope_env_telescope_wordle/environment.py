"""`Wordle`: six guesses at a hidden word, with marks for every letter after each."""

import random
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    ListSource,
    Message,
    MultiTurnEnvironment,
    Rollout,
    Split,
    metric,
    reward,
)
from telescope_core.examples import split_of
from telescope_core.parsers import without_thinking
from telescope_env_telescope_wordle.feedback import feedback, progress
from telescope_env_telescope_wordle.words import WORDS

DEFAULT_INSTRUCTION = (
    "After each guess you see its letters with marks: G = right place, Y = in the word but "
    "elsewhere, - = not in it. Think, then write your next guess between <guess> and </guess>."
)
EVAL_SHARE = 0.2
_GUESS = re.compile(r"<guess>([^<]*)</guess>")
_WORD = re.compile(r"[a-z]{5}")


class Wordle(MultiTurnEnvironment):
    """Find a hidden five-letter word from the feedback to each guess."""

    class Config(EnvironmentConfig):
        """How many guesses there are, and how it is explained."""

        max_guesses: Annotated[int, Field(ge=1, le=20)] = 6
        instruction: str = DEFAULT_INSTRUCTION
        """Follows the first line; empty explains nothing."""
        seed: int = 0
        """The order of the words; it moves none to the other split."""

    config: Config
    max_turns = 20
    success_threshold = 0.9

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._sources = {split: ListSource(self._words(split)) for split in Split}

    def examples(self, split: Split) -> ExampleSource:
        """Return the words of `split`, which a hash of the word decides."""
        return self._sources[split]

    def _words(self, split: Split) -> list[Example]:
        words = [
            word for word in WORDS if split_of(f"wordle/{word}", eval_share=EVAL_SHARE) is split
        ]
        random.Random(f"wordle/{self.config.seed}/{split}").shuffle(words)
        prompt = f"Guess a hidden five-letter word. You have {self.config.max_guesses} guesses."
        if self.config.instruction:
            prompt = f"{prompt} {self.config.instruction}"
        return [Example(id=word, prompt=prompt, answer=word) for word in words]

    def env_response(self, messages: Sequence[Message], episode: Episode) -> str | None:
        """Return the marks of the last guess; None once it is right or was the last."""
        said = [message.content for message in messages if message.role == "assistant"]
        guess = read_guess(said[-1])
        if guess == episode.example.answer or len(said) >= self.config.max_guesses:
            return None
        turn = f"Guess {len(said) + 1} of {self.config.max_guesses}:"
        if guess is None:
            return f"That is no guess: write five letters between <guess> and </guess>.\n{turn}"
        marks = feedback(guess, episode.example.answer)
        return f"{' '.join(guess)}\n{' '.join(marks)}\n{turn}"

    def gold_answer(self, example: Example) -> str:
        """Return the word as a first guess."""
        return f"<guess>{example.answer}</guess>"

    @reward(weight=0.7)
    def solved(self, rollout: Rollout, example: Example) -> float:
        """1 when a guess is the word."""
        return float(example.answer in self._guesses(rollout))

    @reward(weight=0.2)
    def found(self, rollout: Rollout, example: Example) -> float:
        """The share of the word that the best guess has found."""
        guesses = [guess for guess in self._guesses(rollout) if guess is not None]
        return max((progress(feedback(guess, example.answer)) for guess in guesses), default=0.0)

    @reward(weight=0.1)
    def speed(self, rollout: Rollout, example: Example) -> float:
        """1 for the word at once, 0 for the word at last, and 0 without it."""
        guesses = self._guesses(rollout)
        if example.answer not in guesses:
            return 0.0
        return 1.0 - guesses.index(example.answer) / max(1, self.config.max_guesses - 1)

    @metric(low=0, high=20, lower_is_better=True)
    def guesses(self, rollout: Rollout, example: Example) -> float:
        """How many turns were taken."""
        return float(len(self._guesses(rollout)))

    @metric(low=0, high=20, lower_is_better=True)
    def invalid_guesses(self, rollout: Rollout, example: Example) -> float:
        """How many of them were no five letters."""
        return float(self._guesses(rollout).count(None))

    def _guesses(self, rollout: Rollout) -> list[str | None]:
        said = [one.content for one in rollout.messages if one.role == "assistant"]
        return [read_guess(text) for text in said[: self.config.max_guesses]]


def read_guess(text: str) -> str | None:
    """Return the last tagged guess, or a message that is nothing but a word; None if neither."""
    tail = without_thinking(text)[-10_000:]
    tagged = _GUESS.findall(tail)
    word = (tagged[-1] if tagged else tail).strip().lower()
    return word if _WORD.fullmatch(word) else None
