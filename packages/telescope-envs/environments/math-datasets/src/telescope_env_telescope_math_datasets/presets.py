"""The datasets by name: where each is, at which commit, in which columns, and what it asks for."""

from dataclasses import dataclass

from telescope_core.dataset_source import DatasetSpec
from telescope_core.graders.mathematics import AnswerForm

BOXED = "Think step by step, then give the final answer in \\boxed{}."
BOXED_INTEGER = (
    "Think step by step, then give the final answer, an integer from 0 to 999, in \\boxed{}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One dataset: how it is read and asked."""

    spec: DatasetSpec
    instruction: str = BOXED
    """Follows the problem; empty where the dataset's own prompt says how to answer."""
    form: AnswerForm = AnswerForm.BOX
    """The form in which the prompt asks for the final answer."""
    wants_number: bool = False
    """Whether every right answer is a number, so that a calculation is no answer."""


PRESETS: dict[str, Preset] = {
    "gsm8k": Preset(
        spec=DatasetSpec(
            path="openai/gsm8k",
            revision="740312add88f781978c0658806c59bc2815b9866",
            subset="main",
        ),
        wants_number=True,
    ),
    "hendrycks-math": Preset(
        spec=DatasetSpec(
            path="DigitalLearningGmbH/MATH-lighteval",
            revision="0530c78699ea5e8eb5530600900e1f328b48acad",
            subset="default",
        ),
    ),
    "dapo-math": Preset(
        spec=DatasetSpec(
            path="BytedTsinghua-SIA/DAPO-Math-17k",
            revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            eval_split="train",
        ),
        instruction="",
        form=AnswerForm.LINE,
        wants_number=True,
    ),
    "deepscaler": Preset(
        spec=DatasetSpec(
            path="agentica-org/DeepScaleR-Preview-Dataset",
            revision="b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29",
            eval_split="train",
        ),
    ),
    "math500": Preset(
        spec=DatasetSpec(
            path="HuggingFaceH4/MATH-500",
            revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            train_split="",
        ),
    ),
    "aime-2024": Preset(
        spec=DatasetSpec(
            path="Maxwell-Jia/AIME_2024",
            revision="8d88b2876a82a080e2f172cc9b25d0d9d2cb4792",
            train_split="",
            eval_split="train",
        ),
        instruction=BOXED_INTEGER,
        wants_number=True,
    ),
    "aime-2025": Preset(
        spec=DatasetSpec(
            path="math-ai/aime25",
            revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
            train_split="",
        ),
        instruction=BOXED_INTEGER,
        wants_number=True,
    ),
    "aime-2026": Preset(
        spec=DatasetSpec(
            path="math-ai/aime26",
            revision="79037aebdb6580008fb960d17cb21fd3099083e3",
            train_split="",
        ),
        instruction=BOXED_INTEGER,
        wants_number=True,
    ),
}
