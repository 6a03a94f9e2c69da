"""`MathDatasets`: one problem and one answer, from a dataset by name."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    Message,
    Rollout,
    SingleTurnEnvironment,
    Split,
    metric,
    reward,
    runs_in,
)
from telescope_core.dataset_source import DatasetSource, DatasetSpec
from telescope_core.graders.mathematics import (
    AnswerForm,
    MathGrader,
    Verdict,
    answer_key,
    extract_answer,
    numbers_match,
)
from telescope_env_telescope_math_datasets.presets import PRESETS, Preset
from telescope_env_telescope_math_datasets.rows import example_of


class MathDatasets(SingleTurnEnvironment):
    """Problems of well-known datasets of mathematics; answers are checked symbolically."""

    class Config(EnvironmentConfig):
        """Which problems are asked, and how."""

        dataset: Literal[
            "gsm8k",
            "hendrycks-math",
            "dapo-math",
            "deepscaler",
            "math500",
            "aime-2024",
            "aime-2025",
            "aime-2026",
        ] = "gsm8k"
        """The dataset; the last four are for evals only."""
        path: str = ""
        """Read it from here instead: a dataset id on the Hub, a local folder, or a file with the
        same columns."""
        revision: str = ""
        """Commit, tag or branch of the dataset; empty = the commit that its name stands for."""
        instruction: str | None = None
        """Follows the problem; empty asks nothing but the problem. By default a final answer in
        a box is asked for, except where the dataset's own prompt says how to answer."""
        data_folder: str = ""
        """Where downloads are kept; empty = the library's own cache."""

        @model_validator(mode="after")
        def _other_paths_are_pinned(self) -> Self:
            is_local = not self.path or DatasetSpec(path=self.path).local is not None
            if not is_local and not self.revision:
                raise ValueError(
                    f"path {self.path!r} is no local folder or file; to read it from the Hub set "
                    "env.revision to a commit of it"
                )
            return self

        @property
        def preset(self) -> Preset:
            """The dataset's preset."""
            return PRESETS[self.dataset]

        def dataset_spec(self) -> DatasetSpec:
            """Return the table to read: the preset's, unless a setting says otherwise."""
            spec = replace(self.preset.spec, cache_dir=self.data_folder)
            if self.path:
                spec = replace(spec, path=self.path, subset="", revision=self.revision)
            return replace(spec, revision=self.revision or spec.revision)

    config: Config
    network = "load"

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        if self.config.path and Path(self.config.path).expanduser().exists():
            self.network = "none"
        self.grader = MathGrader()
        self.on_close(self.grader.close)

    def splits(self) -> tuple[Split, ...]:
        """Return both splits, or the eval split alone for datasets that are for evals."""
        has_train = bool(self.config.preset.spec.train_split)
        return (Split.TRAIN, Split.EVAL) if has_train else (Split.EVAL,)

    def examples(self, split: Split) -> ExampleSource:
        """Return one split; problems that are in both are left out of training."""
        spec = self.config.dataset_spec()
        return DatasetSource(spec, split, make=partial(example_of, path=spec.path))

    def dataset_revisions(self) -> dict[str, str]:
        """Return the dataset's commit; empty if it is read from this machine."""
        return self.config.dataset_spec().revisions()

    @runs_in("loop")
    def format_prompt(self, example: Example) -> str | list[Message]:
        """Return the problem followed by the instruction, if there is one."""
        instruction = self.instruction
        if isinstance(example.prompt, str):
            return f"{example.prompt}\n\n{instruction}" if instruction else example.prompt
        *before, last = example.prompt
        if not instruction:
            return [*before, last]
        return [*before, replace(last, content=f"{last.content}\n\n{instruction}")]

    @property
    def instruction(self) -> str:
        """What is asked for after the problem."""
        given = self.config.instruction
        return self.config.preset.instruction if given is None else given

    @property
    def form(self) -> AnswerForm | None:
        """The form that the prompt asks for; None if an own instruction names none."""
        given = self.config.instruction
        if given is None or (not given and self.config.preset.form is AnswerForm.LINE):
            return self.config.preset.form
        if "\\boxed" in given:
            return AnswerForm.BOX
        return AnswerForm.LINE if "Answer:" in given else None

    def gold_answer(self, example: Example) -> str | None:
        """Return the answer as the prompt asks for it."""
        is_line = self.form is AnswerForm.LINE
        return f"Answer: {example.answer}" if is_line else f"\\boxed{{{example.answer}}}"

    def answer_of(self, rollout: Rollout) -> str:
        """Return the final answer of a rollout; empty if there is none."""
        return extract_answer(rollout.completion_text, form=self.form)

    @reward
    def correct(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """1 when the final answer is worth the same as the right one.

        Answers of the same worth have one tag, by which they vote in maj@k.
        """
        answer = self.answer_of(rollout)
        are_equal = numbers_match if self.config.preset.wants_number else self.grader.are_equal
        is_right = are_equal(answer, example.answer)
        if vote := answer_key(example.answer if is_right else answer):
            episode.tags["answer"] = vote
        return float(is_right)

    @metric
    def has_answer(self, rollout: Rollout, example: Example) -> float:
        """1 when a final answer can be found."""
        return float(bool(self.answer_of(rollout).strip()))

    @metric(low=0.0, high=1.0, lower_is_better=True)
    def ungradable(self, rollout: Rollout, example: Example) -> float:
        """1 when the grader cannot read the answer, or the right one."""
        answer = self.answer_of(rollout)
        return float(self.grader.compare(answer, example.answer) is Verdict.UNREADABLE)
