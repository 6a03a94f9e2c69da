"""Problems from Hugging Face datasets, or from a local folder that the same library reads."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from telescope_core import ConfigError, Example, Split
from telescope_core.errors import EnvironmentLoadError
from telescope_core.examples import split_of
from telescope_env_telescope_math_reasoning.answers import extract_answer

_QUESTION_FIELDS = ("question", "problem", "prompt")
_ANSWER_FIELDS = ("answer", "solution")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """Which dataset, at which revision, and where questions and answers stand in it."""

    repo: str
    """Dataset id on the Hub, or a local folder."""
    revision: str
    subset: str = ""
    train_split: str = "train"
    eval_split: str = "test"
    question_field: str = ""
    """Empty: the first of question, problem, prompt that is there."""
    answer_field: str = ""
    """Empty: the first of answer, solution that is there."""
    cache_dir: str = ""


PRESETS = {
    "gsm8k": DatasetSpec(
        repo="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        subset="main",
        question_field="question",
        answer_field="answer",
    ),
    "math": DatasetSpec(
        repo="DigitalLearningGmbH/MATH-lighteval",
        revision="0530c78699ea5e8eb5530600900e1f328b48acad",
        subset="default",
        question_field="problem",
        answer_field="solution",
    ),
}


class Table(Protocol):
    """What is used of a `datasets.Dataset`."""

    column_names: list[str]

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Mapping[str, object]: ...


class DatasetSource:
    """One split of a dataset. Questions that are in both splits are left out of training."""

    def __init__(self, spec: DatasetSpec, split: Split) -> None:
        self._table = load_table(spec, spec.eval_split if split is Split.EVAL else spec.train_split)
        self._question = _field(self._table, spec.question_field, _QUESTION_FIELDS, spec.repo)
        self._answer = _field(self._table, spec.answer_field, _ANSWER_FIELDS, spec.repo)
        questions = [str(question) for question in _column(self._table, self._question)]
        rows = list(range(len(questions)))
        if spec.train_split == spec.eval_split:
            rows = [row for row in rows if split_of(questions[row]) is split]
        elif split is Split.TRAIN:
            held_out_table = load_table(spec, spec.eval_split)
            held_out = {str(question) for question in _column(held_out_table, self._question)}
            rows = [row for row in rows if questions[row] not in held_out]
        first_row = {questions[row]: row for row in reversed(rows)}
        self._rows = [row for row in rows if first_row[questions[row]] == row]

    @property
    def num_examples(self) -> int | None:
        """Rows of this split, without repetitions."""
        return len(self._rows)

    def example(self, index: int) -> Example:
        """Return example `index`."""
        if not 0 <= index < len(self._rows):
            raise IndexError(f"example {index} of {len(self._rows)}")
        row = self._table[self._rows[index]]
        question = str(row[self._question])
        return Example(
            id=hashlib.sha256(question.encode()).hexdigest()[:16],
            prompt=question,
            answer=final_answer(str(row[self._answer])),
        )


def final_answer(text: str) -> str:
    """Return the answer of a worked solution: after `####`, else boxed, else the whole text."""
    if "####" in text:
        return re.sub(r"(?<=[0-9]),(?=[0-9])", "", text.rpartition("####")[2].strip())
    return extract_answer(text) if "\\boxed" in text else text.strip()


def load_table(spec: DatasetSpec, split: str) -> Table:
    """Load one split with the `datasets` library; its errors come back with advice."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise EnvironmentLoadError(
            "math-reasoning reads datasets with the `datasets` library, which is not installed; "
            "run: pip install datasets"
        ) from error
    is_folder = Path(spec.repo).expanduser().is_dir()
    try:
        loaded: object = datasets.load_dataset(
            str(Path(spec.repo).expanduser()) if is_folder else spec.repo,
            spec.subset or None,
            split=split,
            revision=None if is_folder else spec.revision,
            cache_dir=spec.cache_dir or None,
        )
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise EnvironmentLoadError(
            f"cannot load split {split!r} of dataset {spec.repo!r} (subset {spec.subset or None!r},"
            f" revision {spec.revision or None!r}): {error}; check the id, the revision and the "
            "network, or give a local folder as env.dataset"
        ) from error
    return cast(Table, loaded)


def _column(table: Table, name: str) -> list[object]:
    if name not in table.column_names:
        raise ConfigError(f"dataset has no field {name!r}; it has {', '.join(table.column_names)}")
    return list(cast(Mapping[str, list[object]], table)[name])


def _field(table: Table, wanted: str, usual: tuple[str, ...], repo: str) -> str:
    names = (wanted,) if wanted else usual
    for name in names:
        if name in table.column_names:
            return name
    raise ConfigError(
        f"dataset {repo!r} has none of the fields {', '.join(names)}; it has "
        f"{', '.join(table.column_names)}: set env.question_field and env.answer_field"
    )
