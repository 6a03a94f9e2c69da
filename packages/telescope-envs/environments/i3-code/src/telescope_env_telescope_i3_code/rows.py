"""Rows of tables of programming problems: where the question is, and where the tests are.

Rows are read without their tests being parsed, which a table of twenty thousand would take minutes
for. `tests.tests_of` does that, once a problem is graded.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

from telescope_core import Example
from telescope_core.errors import ConfigError
from telescope_core.example_checks import as_text
from telescope_core.types import JsonValue

Row = Mapping[str, object]
_QUESTION = ("question", "question_content", "problem", "prompt", "description")
_TESTS = ("info", "tests", "input_output", "private_test_cases", "public_test_cases", "test_cases")
"""A row may have several of the columns with tests; `info` counts only if it has tests inside."""
_SOLUTION = ("gold", "solution")
_KEPT = ("starter_code", "metadata", "fn_name")


def example_of(row: Row, *, path: str) -> Example:
    """Return the problem in `row`; its id is a hash of the question, whatever else the row holds.

    Raises ConfigError when there is no question, or no column with tests.
    """
    question = _text(row, _QUESTION)
    if not question:
        raise ConfigError(
            f"dataset {path!r} has a row without {', '.join(_QUESTION)}; it has {', '.join(row)}"
        )
    tests = {name: _as_text(row[name]) for name in _TESTS if row.get(name)}
    if not tests:
        raise ConfigError(
            f"dataset {path!r}: the row {question[:60]!r} has no tests; they must be in one of the "
            f"columns {', '.join(_TESTS)}, and it has {', '.join(row)}"
        )
    kept = {name: _as_text(row[name]) for name in _KEPT if row.get(name)}
    gold = _text(row, _SOLUTION)
    info: dict[str, JsonValue] = {**kept, **tests, **({"gold": gold} if gold else {})}
    digest = hashlib.sha256(question.encode()).hexdigest()[:16]
    return Example(id=digest, prompt=question, info=info)


def _text(row: Row, names: Sequence[str]) -> str:
    found = (as_text(row[name], f"the column {name!r}") for name in names if row.get(name))
    return next(found, "")


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
