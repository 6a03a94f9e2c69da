"""`MathReasoning`: generated or downloaded problems, one question and one answer."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

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
    runs_in,
)
from telescope_core.dataset_source import DatasetSpec
from telescope_core.examples import SplitSource
from telescope_core.graders.mathematics import (
    AnswerForm,
    MathGrader,
    Verdict,
    as_fraction,
    extract_answer,
    has_box,
    numbers_match,
)
from telescope_env_telescope_math_reasoning.competition import draw_competition
from telescope_env_telescope_math_reasoning.digits import draw_digits
from telescope_env_telescope_math_reasoning.grade_school import draw_grade_school
from telescope_env_telescope_math_reasoning.hub import PRESETS, problems
from telescope_env_telescope_math_reasoning.problem import Problem

DEFAULT_INSTRUCTION = "Think step by step, then give the final answer in \\boxed{}."


class MathReasoning(SingleTurnEnvironment):
    """Mathematics from one-digit sums to competition problems; answers are checked symbolically."""

    class Config(EnvironmentConfig):
        """Which problems are asked, and how."""

        level: Literal["digit", "grade-school", "competition"] = "grade-school"
        """The difficulty of generated problems; without effect when `dataset` is set."""
        operations: str = "+-"
        """Digit level: the operators, some of + - * /."""
        max_digits: Annotated[int, Field(ge=1, le=12)] = 2
        """Digit level: the largest number of digits of an operand."""
        seed: int = 0
        """Which problems are generated."""
        instruction: str = DEFAULT_INSTRUCTION
        """Follows the problem; empty asks nothing but the problem."""
        dataset: str = ""
        """`gsm8k`, `math`, any dataset id on the Hugging Face Hub, or a local folder."""
        dataset_subset: str = ""
        dataset_revision: str = ""
        """Commit, tag or branch of a dataset on the Hub; the presets are pinned."""
        train_split: str = "train"
        eval_split: str = "test"
        """The same name as train_split divides that split by a hash of the question."""
        question_field: str = ""
        answer_field: str = ""
        data_folder: str = ""
        """Where downloaded datasets are kept; empty = the library's own cache."""

        @field_validator("operations")
        @classmethod
        def _known_operations(cls, operations: str) -> str:
            if not operations or set(operations) - set("+-*/"):
                raise ValueError("expected some of + - * /, such as '+-'")
            return operations

        @model_validator(mode="after")
        def _dataset_is_pinned(self) -> Self:
            on_hub = self.dataset and self.dataset not in PRESETS
            if (
                on_hub
                and not self.dataset_revision
                and not Path(self.dataset).expanduser().is_dir()
            ):
                raise ValueError(
                    f"dataset {self.dataset!r} is neither a local folder nor one of "
                    f"{', '.join(PRESETS)}; to load it from the Hub set env.dataset_revision to a "
                    "commit, tag or branch"
                )
            return self

        def dataset_spec(self) -> DatasetSpec:
            """Return the dataset to load: a preset, or what the fields say."""
            if self.dataset in PRESETS:
                preset = PRESETS[self.dataset]
                revision = self.dataset_revision or preset.revision
                return replace(preset, revision=revision, cache_dir=self.data_folder)
            return DatasetSpec(
                path=self.dataset,
                revision=self.dataset_revision,
                subset=self.dataset_subset,
                train_split=self.train_split,
                eval_split=self.eval_split,
                prompt_field=self.question_field,
                answer_field=self.answer_field,
                cache_dir=self.data_folder,
            )

    config: Config

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        self.grader = MathGrader()
        self.on_close(self.grader.close)
        self.network = "load" if self.config.dataset else "none"
        self._sources: dict[Split, ExampleSource] = {}

    def examples(self, split: Split) -> ExampleSource:
        """Return the dataset's split, or endless generated problems split by their own hash."""
        if split not in self._sources:
            self._sources[split] = (
                problems(self.config.dataset_spec(), split)
                if self.config.dataset
                else SplitSource(
                    self._draw,
                    split=split,
                    seed=f"math/{self.config.seed}",
                    split_key=lambda example: str(example.info["problem"]),
                )
            )
        return self._sources[split]

    def dataset_revisions(self) -> dict[str, str]:
        """Return the dataset's revision, when one is loaded."""
        return self.config.dataset_spec().revisions() if self.config.dataset else {}

    @runs_in("loop")
    def format_prompt(self, example: Example) -> str:
        """Return the problem and, when there is one, the instruction."""
        problem = str(example.prompt)
        return f"{problem}\n\n{self.config.instruction}" if self.config.instruction else problem

    @property
    def form(self) -> AnswerForm | None:
        """The form that the instruction asks for; None if it names none."""
        return AnswerForm.BOX if "\\boxed" in self.config.instruction else None

    def gold_answer(self, example: Example) -> str | None:
        """Return the answer alone, boxed where the instruction asks for a box."""
        boxed = self.form is AnswerForm.BOX or as_fraction(example.answer) is None
        return f"\\boxed{{{example.answer}}}" if boxed else example.answer

    @reward
    def correct(self, rollout: Rollout, example: Example) -> float:
        """1 when the final answer is worth the same as the right one.

        A generated problem with a number for an answer wants a number, not a calculation: else
        repeating the question would solve it.
        """
        answer = extract_answer(rollout.completion_text, form=self.form)
        if not self.config.dataset and as_fraction(example.answer) is not None:
            return float(numbers_match(answer, example.answer))
        return float(self.grader.are_equal(answer, example.answer))

    @metric(low=0.0, high=1.0, lower_is_better=True)
    def ungradable(self, rollout: Rollout, example: Example) -> float:
        """1 when the grader cannot read the answer, or the right one."""
        answer = extract_answer(rollout.completion_text, form=self.form)
        return float(self.grader.compare(answer, example.answer) is Verdict.UNREADABLE)

    @metric
    def uses_boxed(self, rollout: Rollout, example: Example) -> float:
        """1 when an answer stands in a box."""
        return float(has_box(rollout.completion_text))

    def _draw(self, rng: random.Random) -> Example:
        problem = self._problem(rng)
        digest = hashlib.sha256(problem.key.encode()).hexdigest()[:16]
        is_short = self.config.level == "digit"
        return Example(
            id=problem.question.rstrip("=") if is_short else digest,
            prompt=problem.question,
            answer=problem.answer,
            info={"problem": problem.key},
        )

    def _problem(self, rng: random.Random) -> Problem:
        config = self.config
        if config.level == "digit":
            return draw_digits(rng, operations=config.operations, max_digits=config.max_digits)
        return (draw_grade_school if config.level == "grade-school" else draw_competition)(rng)
