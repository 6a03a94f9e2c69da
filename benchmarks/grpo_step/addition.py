"""Adding two numbers: the task both sides train on, and its reward.

`37+5` is answered `42`, or by counting: `38,39,40,41,42`, whose length grows with the second
number. `12+63=75` says where counting ends, so that long answers can be learnt soon. The reward is
1 when the last number is right.
"""

import random
from functools import partial

from telescope_core import Example, Rollout, SingleTurnEnvironment, Split, reward, runs_in
from telescope_core.environments.base import EnvironmentConfig
from telescope_core.examples import SplitSource

NAME = "grpo_step.addition:Addition"


class Addition(SingleTurnEnvironment):
    """Add two numbers, at once or by counting."""

    class Config(EnvironmentConfig):
        """Which numbers, and what the gold answer shows."""

        max_first: int = 99
        max_second: int = 99
        by_counting: bool = False
        shows_sum: bool = False
        seed: int = 0

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        # Kept, because a new source walks from its start to the example that is asked for.
        self._sources = {
            split: SplitSource(partial(_draw, self.config), split=split, seed=self.config.seed)
            for split in Split
        }

    def examples(self, split: Split) -> SplitSource:
        """Return the problems in the order of the seed; they repeat when they run out."""
        return self._sources[split]

    def gold_answer(self, example: Example) -> str:
        """Return the sum, after every number on the way to it when counting."""
        if not self.config.by_counting:
            return example.answer
        first, total = int(example.prompt.split("+")[0]), int(example.answer)
        return ",".join(map(str, range(first + 1, total + 1)))

    @reward
    @runs_in("loop")  # it compares two short texts; TRL calls it in its own process as well
    def correct(self, rollout: Rollout, example: Example) -> float:
        """Return 1 when the last number is right."""
        return score(rollout.completion_text, example.answer)


def score(text: str, answer: str) -> float:
    """Return 1 when the last number of `text` is `answer`, else 0."""
    return float(text.rsplit(",", 1)[-1] == answer)


def _draw(config: Addition.Config, rng: random.Random) -> Example:
    first, second = rng.randint(10, config.max_first), rng.randint(1, config.max_second)
    sum_ = first + second
    prompt = f"{first}+{second}={sum_}" if config.shows_sum else f"{first}+{second}"
    return Example(id=prompt, prompt=prompt, answer=str(sum_))
