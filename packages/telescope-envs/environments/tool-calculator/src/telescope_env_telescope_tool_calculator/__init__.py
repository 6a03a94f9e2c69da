"""Sums too large for the head, and a calculator for one step at a time. Read it as an example."""

import random
import re
from typing import Annotated, Literal

from pydantic import Field

from telescope_core import (
    Example,
    ExampleSource,
    Rollout,
    Split,
    SplitSource,
    ToolConfig,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.graders.mathematics import extract_answer, numbers_match
from telescope_core.parsers import without_thinking

Operation = Literal["+", "-", "*"]
OPERATIONS: tuple[Operation, ...] = ("+", "-", "*")
_WORDS = {"+": "add", "-": "subtract", "*": "multiply by"}


class ToolCalculator(ToolEnvironment):
    """Work out a chain of steps with a calculator; the answer in the last message counts."""

    class Config(ToolConfig):
        """Which chains are drawn."""

        num_steps: Annotated[int, Field(ge=1, le=8)] = 2
        max_number: Annotated[int, Field(ge=9, le=100_000)] = 999
        seed: int = 0

    config: Config

    @tool
    def calculate(self, left: int, operation: Operation, right: int) -> int:
        """Work out one step.

        Args:
            left: The number on the left.
            operation: What to do with the two.
            right: The number on the right.
        """
        return {"+": left + right, "-": left - right, "*": left * right}[operation]

    def examples(self, split: Split) -> ExampleSource:
        """Return endless, distinct chains; a hash of the chain decides its split."""
        return SplitSource(self._draw, split=split, seed=f"calculator/{self.config.seed}")

    def _draw(self, rng: random.Random) -> Example:
        total = rng.randint(2, self.config.max_number)
        steps = [f"Start with {total}."]
        for _ in range(self.config.num_steps):
            operation, number = rng.choice(OPERATIONS), rng.randint(2, self.config.max_number)
            total = self.calculate(total, operation, number)
            steps.append(f"Then {_WORDS[operation]} {number}.")
        chain = " ".join(steps)
        if str(total) in re.findall(r"-?\d+", chain):
            return self._draw(rng)  # repeating the question must not earn anything
        return Example(
            id=chain, prompt=f"{chain} What is the result? End with it.", answer=str(total)
        )

    def gold_answer(self, example: Example) -> str:
        """Return the number alone."""
        return example.answer

    @reward
    def correct(self, rollout: Rollout, example: Example) -> float:
        """1 when the answer in the last message is the result."""
        said = extract_answer(without_thinking(rollout.completion_text)[-200:])
        return float(numbers_match(said, example.answer))
