"""A toy environment that a tiny model learns in seconds: say the last digit of the prompt again."""

from telescope_core.environments import SingleTurnEnvironment, ToolEnvironment, reward, tool
from telescope_core.examples import GeneratedSource
from telescope_core.types import Example


class LastDigit(SingleTurnEnvironment):
    """The answer stands in the prompt."""

    def examples(self, split):
        def make(random, index):
            digits = f"{random.randrange(1000):03d}"
            return Example(id=f"{split}-{index}", prompt=f"{digits}=", answer=digits[-1])

        return GeneratedSource(make, seed=f"last-digit/{split}")

    def gold_answer(self, example):
        return example.answer

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.answer)


class NoGold(LastDigit):
    """Has no gold answers."""

    def gold_answer(self, example):
        return None


class BadGold(LastDigit):
    """Its gold answers earn nothing."""

    def gold_answer(self, example):
        return "x"


class Counter(ToolEnvironment):
    """Offers a tool, which its gold answer does without."""

    def examples(self, split):
        return [Example(id=f"{split}-{n}", prompt="a" * n, answer=str(n)) for n in range(1, 5)]

    @tool
    def count(self, text: str) -> int:
        """Count the characters of a text.

        Args:
            text: What is counted.
        """
        return len(text)

    def gold_answer(self, example):
        return example.answer

    @reward
    def counted(self, rollout, example):
        return float(rollout.completion_text == example.answer)
