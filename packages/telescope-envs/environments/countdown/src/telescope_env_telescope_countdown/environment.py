"""`Countdown`: numbers and a target; the answer is an expression, judged exactly."""

import random
import re
from collections import Counter
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from telescope_core import (
    EnvironmentConfig,
    Example,
    ExampleSource,
    Rollout,
    SingleTurnEnvironment,
    Split,
    metric,
    reward,
)
from telescope_core.examples import SplitSource
from telescope_core.parsers import without_thinking
from telescope_env_telescope_countdown.expression import (
    Expression,
    ExpressionError,
    parse_expression,
)
from telescope_env_telescope_countdown.solver import Puzzle, draw_puzzle, solve

DEFAULT_INSTRUCTION = (
    "Think it through, then write the expression, without the target, between "
    "<answer> and </answer>."
)
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
_MAX_COMPLETION = 100_000


class Countdown(SingleTurnEnvironment):
    """Reach a target from given numbers with + - * / and parentheses."""

    class Config(EnvironmentConfig):
        """Which puzzles are drawn and how they are asked."""

        min_numbers: Annotated[int, Field(ge=2, le=6)] = 3
        max_numbers: Annotated[int, Field(ge=2, le=6)] = 4
        max_number: Annotated[int, Field(ge=2, le=1000)] = 20
        """Numbers are drawn from 1 .. max_number."""
        max_target: Annotated[int, Field(ge=2, le=100_000)] = 100
        operations: str = "+-*/"
        """The operators that may be used."""
        use_all: bool = True
        """Whether every number must be used; otherwise each at most once."""
        instruction: str = DEFAULT_INSTRUCTION
        """Follows the puzzle; empty asks as shortly as `3 5 8=16`."""
        seed: int = 0

        @field_validator("operations")
        @classmethod
        def _known_operations(cls, operations: str) -> str:
            if (
                not operations
                or set(operations) - set("+-*/")
                or len(set(operations)) < len(operations)
            ):
                raise ValueError("expected some of + - * /, each once, such as '+-'")
            return "".join(sorted(operations, key="+-*/".index))

        @model_validator(mode="after")
        def _numbers_in_order(self) -> Self:
            if self.min_numbers > self.max_numbers:
                raise ValueError(
                    f"min_numbers must be at most max_numbers, got {self.min_numbers} "
                    f"and {self.max_numbers}"
                )
            return self

    config: Config

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self._sources = {
            split: SplitSource(self._draw, split=split, seed=f"countdown/{self.config.seed}")
            for split in Split
        }

    def examples(self, split: Split) -> ExampleSource:
        """Return endless, distinct puzzles; a hash of the puzzle decides its split."""
        return self._sources[split]

    def gold_answer(self, example: Example) -> str | None:
        """Return the canonical solution, in tags where the instruction asks for them."""
        puzzle = _puzzle(example)
        solution = solve(puzzle, operations=self.config.operations, use_all=self.config.use_all)
        assert solution is not None, f"puzzle {puzzle.text} is solvable by construction"
        return f"<answer>{solution}</answer>" if "<answer>" in self.config.instruction else solution

    @reward(weight=0.9)
    def correct(self, rollout: Rollout, example: Example) -> float:
        """1 when the expression keeps the rules and is worth exactly the target."""
        expression = self._legal_expression(rollout, example)
        return float(expression is not None and expression.value == _puzzle(example).target)

    @reward(weight=0.1)
    def well_formed(self, rollout: Rollout, example: Example) -> float:
        """1 when the expression keeps the rules, whatever it is worth."""
        return float(self._legal_expression(rollout, example) is not None)

    @metric
    def uses_tags(self, rollout: Rollout, example: Example) -> float:
        """1 when the answer stands in <answer> tags."""
        return float(_ANSWER.search(_tail(rollout.completion_text)) is not None)

    def _draw(self, rng: random.Random) -> Example:
        config = self.config
        puzzle = draw_puzzle(
            rng,
            num_numbers=(config.min_numbers, config.max_numbers),
            max_number=config.max_number,
            max_target=config.max_target,
            operations=config.operations,
            use_all=config.use_all,
        )
        prompt = puzzle.text
        if config.instruction:
            rule = "each exactly once" if config.use_all else "each at most once"
            prompt = (
                f"Numbers: {', '.join(str(number) for number in puzzle.numbers)}\n"
                f"Target: {puzzle.target}\n\n"
                f"Use the numbers, {rule}, with {' '.join(config.operations)} and parentheses "
                f"to make the target. {config.instruction}"
            )
        return Example(
            id=puzzle.text,
            prompt=prompt,
            info={"numbers": puzzle.numbers, "target": puzzle.target},
        )

    def _legal_expression(self, rollout: Rollout, example: Example) -> Expression | None:
        try:
            expression = parse_expression(extract_expression(rollout.completion_text))
        except ExpressionError:
            return None
        puzzle = _puzzle(example)
        used, given = Counter(expression.numbers), Counter(puzzle.numbers)
        keeps_numbers = used == given if self.config.use_all else used <= given
        used_operations = {*expression.operators, *expression.signs}
        keeps_operations = used_operations <= set(self.config.operations)
        return expression if expression.operators and keeps_numbers and keeps_operations else None


def extract_expression(completion: str) -> str:
    """Return the answer's text: the last <answer>, else the last line, up to an equals sign."""
    tail = _tail(completion)
    tagged = _ANSWER.findall(tail)
    if tagged:
        text = tagged[-1]
    else:
        lines = [line for line in tail.splitlines() if line.strip()]
        text = lines[-1] if lines else ""
    return text.partition("=")[0].strip(" \t\r\n")


def _tail(completion: str) -> str:
    return without_thinking(completion)[-_MAX_COMPLETION:]


def _puzzle(example: Example) -> Puzzle:
    numbers, target = example.info["numbers"], example.info["target"]
    assert isinstance(numbers, tuple), f"numbers of example {example.id}"
    assert isinstance(target, int), f"target of example {example.id}"
    return Puzzle(numbers=tuple(int(str(number)) for number in numbers), target=target)
