"""`ReasoningGym`: questions of the reasoning-gym package, scored by its verifiers."""

import hashlib
import itertools
import random
from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, model_validator

from telescope_core import (
    EnvironmentConfig,
    Example,
    ExampleSource,
    Rollout,
    SingleTurnEnvironment,
    Split,
    SplitSource,
    metric,
    reward,
)
from telescope_core.errors import ConfigError
from telescope_core.parsers import without_thinking, xml_tag
from telescope_env_telescope_reasoning_gym.tasks import TaskEntries, check_options, read_tasks

DEFAULT_INSTRUCTION = (
    "Think it through, then write only the answer itself between <answer> and </answer>."
)
_MAX_COMPLETION = 100_000


class ReasoningGym(SingleTurnEnvironment):
    """Procedural reasoning tasks, endless and checked by their own verifiers."""

    class Config(EnvironmentConfig):
        """Which tasks, and how they are asked."""

        task: str = "chain_sum"
        """The task's name, several separated by commas, or `all`."""
        options: dict[str, Any] = Field(default_factory=dict[str, Any])
        """The task's own settings, such as { min_terms = 2 }; for one task only."""
        instruction: str = DEFAULT_INSTRUCTION
        """Follows the question; empty takes the whole completion for the answer."""
        seed: int = 0

        @model_validator(mode="after")
        def _known_tasks_and_options(self) -> Self:
            tasks = read_tasks(self.task)
            if self.options and len(tasks) > 1:
                raise ConfigError(
                    f"options are those of one task, but task names {len(tasks)}: {self.task!r}"
                )
            if self.options:
                for task in tasks:
                    check_options(task, self.options)
            return self

    config: Config

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._entries = TaskEntries(
            read_tasks(self.config.task), self.config.options, seed=self.config.seed
        )
        self._sources = {
            split: SplitSource(self._walk(), split=split, seed=self.config.seed, eval_share=0.5)
            for split in Split
        }

    def examples(self, split: Split) -> ExampleSource:
        """Return endless, distinct questions; a hash of the question decides its split."""
        return self._sources[split]

    def gold_answer(self, example: Example) -> str | None:
        """Return an answer that earns the maximum, in tags where the instruction asks for them."""
        gold = self._entries.gold(_position(example))
        if gold is None or "<answer>" not in self.config.instruction:
            return gold
        return f"<answer>{gold}</answer>"

    @reward
    def verified(self, rollout: Rollout, example: Example) -> float:
        """What the task's verifier gives, 0 to 1: some give a part for an answer that is close."""
        answer = self._answer(rollout)
        if answer is None:
            return 0.0
        return self._entries.verdict(_position(example), answer).score

    @metric(low=0, high=1)
    def readable(self, rollout: Rollout, example: Example) -> float:
        """1 when there is an answer that the verifier could read."""
        answer = self._answer(rollout)
        if answer is None:
            return 0.0
        return float(self._entries.verdict(_position(example), answer).is_readable)

    def _walk(self) -> Callable[[random.Random], Example]:
        # A source draws one after the other, so counting gives every process the same walk.
        positions = filter(self._entries.is_usable, itertools.count())
        return lambda rng: self._example(next(positions))

    def _example(self, position: int) -> Example:
        task = self._entries.task(position)
        question = str(self._entries.entry(position)["question"]).strip()
        digest = hashlib.sha256(question.encode()).hexdigest()[:16]
        parts = [question, self.config.instruction] if self.config.instruction else [question]
        return Example(
            id=f"{task}/{digest}",
            prompt="\n\n".join(parts),
            info={"task": task, "position": position},
        )

    def _answer(self, rollout: Rollout) -> str | None:
        tail = without_thinking(rollout.completion_text)[-_MAX_COMPLETION:]
        if not self.config.instruction:
            return tail.strip()
        return xml_tag(tail, "answer")


def _position(example: Example) -> int:
    position = example.info["position"]
    assert isinstance(position, int), f"position of example {example.id}"
    return position
