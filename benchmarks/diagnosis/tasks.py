"""The tasks that runs are trained on: sums, letters backwards, vowels, two turns, and a tool.

What a task asks and how it grades are attributes of it, so that a fault can be planted in one that
is being played.
"""

import inspect
import json
import random
from collections.abc import Awaitable, Callable
from functools import partial

from telescope_core import (
    Episode,
    Example,
    Message,
    MultiTurnEnvironment,
    Rollout,
    SingleTurnEnvironment,
    Split,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.environments.base import EnvironmentConfig
from telescope_core.examples import ListSource, SplitSource

LETTERS = "abcdefghijklmnopqrstuvwxyz"
Grade = Callable[[str, str], float | Awaitable[float]]
"""(answer of the policy, right answer) -> reward."""


def exactly(said: str, answer: str) -> float:
    """Return 1 for the right answer."""
    return float(said == answer)


class Task(SingleTurnEnvironment):
    """One question, one answer."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self.grade: Grade = exactly
        self.ask: Callable[[Example], str] = lambda example: str(example.prompt)
        # Kept, because a new source walks from its start to the example that is asked for.
        self._sources = {
            split: SplitSource(self.draw, split=split, seed=type(self).__name__) for split in Split
        }

    def examples(self, split: Split) -> SplitSource:
        """Return endless examples; a hash of each one's id decides its split."""
        return self._sources[split]

    def format_prompt(self, example: Example) -> str:
        """Return the question."""
        return self.ask(example)

    def gold_answer(self, example: Example) -> str:
        """Return the right answer."""
        return example.answer

    @reward
    async def correct(self, completion: str, answer: str) -> float:
        """Grade the answer."""
        found = self.grade(completion, answer)
        return await found if inspect.isawaitable(found) else found


def one_sum(draw: random.Random, digits: int = 2) -> tuple[str, str]:
    """Return a sum of a number of `digits` digits and a digit, and what it is."""
    first, second = draw.randrange(10 ** (digits - 1), 10**digits), draw.randrange(10)
    return f"{first}+{second}=", str(first + second)


class Sums(Task):
    """Add two numbers."""

    def draw(self, random: random.Random) -> Example:
        """Return a sum."""
        question, answer = one_sum(random)
        return Example(id=question, prompt=question, answer=answer)


class Backwards(Task):
    """Write three letters backwards."""

    def draw(self, random: random.Random) -> Example:
        """Return three letters."""
        letters = "".join(random.choices(LETTERS[:6], k=3))
        return Example(id=letters, prompt=f"<{letters}", answer=letters[::-1])


class Alphabet(Task):
    """Go on with the alphabet, round and round, for 64 letters."""

    def draw(self, random: random.Random) -> Example:
        """Return two letters to begin behind; the second one only makes more examples."""
        first, other = random.choices(LETTERS, k=2)
        at = LETTERS.index(first) + 1
        return Example(
            id=first + other, prompt=f">{other}{first}", answer=(4 * LETTERS)[at : at + 64]
        )


class Vowels(Task):
    """Write vowels; no two answers earn the same, and none is wrong altogether."""

    success_threshold = 0.1

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self.grade = lambda said, answer: sum(one in "aeiou" for one in said) / max(1, len(said))

    def draw(self, random: random.Random) -> Example:
        """Return six letters to begin with, one of them a vowel, which a warm start learns."""
        number = f"{random.randrange(1000):03d}"
        letters = [random.choice("aeiou"), *random.choices(LETTERS, k=5)]
        random.shuffle(letters)
        return Example(id=number, prompt=f"?{number}", answer="".join(letters))


class Parts(Sums):
    """The same sums, with a part for their form beside the sum: at least three characters."""

    form_share = 0.0
    """Of the reward; the form counts nothing until a fault is planted."""

    @reward
    async def form(self, completion: str) -> float:
        """Return 1 for an answer that is long enough."""
        return float(len(completion) >= 3)

    def compute_reward(self, rollout: Rollout, example: Example) -> float:
        """Return the sum of the parts."""
        parts = rollout.rewards
        return (1 - self.form_share) * parts["correct"] + self.form_share * parts["form"]


class FewSums(Sums):
    """The same few sums again and again."""

    def examples(self, split: Split) -> ListSource:
        """Return three examples, each under 40 names."""
        draw = partial(one_sum, random.Random(0))
        return ListSource(
            [
                Example(id=f"{split}-{name}-{question}", prompt=question, answer=answer)
                for question, answer in (draw() for _ in range(3))
                for name in range(40)
            ]
        )


class NearSums(Sums):
    """The same sums; what is near the right answer gets a part of the reward."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self.grade = lambda said, answer: (
            max(0.0, 1 - abs(int(said) - int(answer)) / 20) if said.isdecimal() else 0.0
        )


class LongSums(Sums):
    """Sums that are too hard."""

    def draw(self, random: random.Random) -> Example:
        """Return a sum of a number of ten digits."""
        question, answer = one_sum(random, digits=10)
        return Example(id=question, prompt=question, answer=answer)


class TwoSums(MultiTurnEnvironment):
    """A sum, and another one in the second turn; both count."""

    max_turns = 2

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._sources = {split: SplitSource(self.draw, split=split, seed="two") for split in Split}

    def examples(self, split: Split) -> SplitSource:
        """Return endless examples."""
        return self._sources[split]

    def draw(self, random: random.Random) -> Example:
        """Return two sums."""
        (first, one), (second, two) = one_sum(random), one_sum(random)
        return Example(id=first + second, prompt=first, answer=one, info={"next": [second, two]})

    def env_response(self, messages: list[Message], episode: Episode) -> str:
        """Ask the second sum."""
        return episode.example.info["next"][0]

    def gold_answer(self, example: Example) -> list[str]:
        """Return both answers."""
        return [example.answer, example.info["next"][1]]

    @reward
    async def correct(self, rollout: Rollout, example: Example) -> float:
        """Return the share of the answers that are right."""
        said = [one.content for one in rollout.messages if one.role == "assistant"]
        gold = self.gold_answer(example)
        return sum(a == b for a, b in zip(said, gold, strict=False)) / 2


class Calls(ToolEnvironment):
    """Add two digits with a tool that does it."""

    max_turns = 2

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self.is_broken = False

    @tool
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One number.
            b: Another one.
        """
        if self.is_broken:
            raise RuntimeError("no memory left")
        return a + b

    def examples(self, split: Split) -> ListSource:
        """Return a few sums of two digits."""
        pairs = [(a, b) for a in range(4) for b in range(4)][split == Split.EVAL :: 2]
        return ListSource(
            [Example(id=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in pairs]
        )

    def gold_answer(self, example: Example) -> list[str]:
        """Return the call, and then the answer."""
        first, second = str(example.prompt).rstrip("=").split("+")
        call = {"name": "add", "arguments": {"a": int(first), "b": int(second)}}
        return [f"<tool_call>{json.dumps(call)}</tool_call>", example.answer]

    @reward
    async def correct(self, completion: str, answer: str) -> float:
        """Return 1 for the right answer."""
        return float(completion == answer)
