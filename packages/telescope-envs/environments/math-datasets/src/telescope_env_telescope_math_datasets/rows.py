"""Rows of the datasets as examples: which column holds the problem, and where the answer stands."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import cast

from telescope_core import Example, Message
from telescope_core.dataset_source import as_prompt
from telescope_core.errors import ConfigError
from telescope_core.example_checks import as_text
from telescope_core.graders.mathematics import final_answer

Row = Mapping[str, object]
_PROBLEM = ("problem", "question", "prompt")
_NOTES = ("level", "type", "subject")
"""Columns that say what kind of problem it is; they are kept with the example."""


def example_of(row: Row, *, path: str) -> Example:
    """Return the problem in `row`; its id is a hash of the problem, whatever else the row holds.

    Columns are found in any case, as `Problem` and `problem`. The answer stands in `answer`, in
    `reward_model.ground_truth`, or at the end of `solution`: after `####`, in a box, or alone.
    """
    columns = {name.casefold(): value for name, value in row.items()}
    prompt = as_prompt(_found(columns, _PROBLEM, path))
    answer = _answer(columns, path)
    if not answer:
        raise ConfigError(
            f"dataset {path!r}: the row {_text(prompt)[:60]!r} has no answer; correct it or leave "
            "it out of the dataset"
        )
    notes = {name: str(columns[name]) for name in _NOTES if columns.get(name) is not None}
    digest = hashlib.sha256(_text(prompt).encode()).hexdigest()[:16]
    return Example(id=digest, prompt=prompt, answer=answer, info=notes)


def _answer(columns: Row, path: str) -> str:
    graded = columns.get("reward_model")
    if isinstance(graded, Mapping):
        right = cast(Mapping[str, object], graded).get("ground_truth")
        where = f"dataset {path!r}: ground_truth"
        return final_answer(as_text(right, where)) if right is not None else ""
    found = _found(columns, ("answer", "solution"), path)
    return final_answer(as_text(found, f"dataset {path!r}: the answer"))


def _found(columns: Row, names: Sequence[str], path: str) -> object:
    for name in names:
        if columns.get(name) is not None:
            return columns[name]
    raise ConfigError(
        f"dataset {path!r} has no column {', '.join(names)}; it has {', '.join(columns)}"
    )


def _text(prompt: str | tuple[Message, ...]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)
