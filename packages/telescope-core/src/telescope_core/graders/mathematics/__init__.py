"""Grading of mathematics: finding the final answer in a text, and comparing it with the right one.

`MathGrader` compares symbolically with `math-verify` (`telescope-core[math]`), which an environment
names among its dependencies. Everything else here needs no package.
"""

from telescope_core.graders.mathematics.answers import (
    AnswerForm,
    extract_answer,
    final_answer,
    has_box,
)
from telescope_core.graders.mathematics.comparing import Verdict
from telescope_core.graders.mathematics.grader import MathGrader, numbers_match
from telescope_core.graders.mathematics.numbers import answer_key, as_fraction

__all__ = [
    "AnswerForm",
    "MathGrader",
    "Verdict",
    "answer_key",
    "as_fraction",
    "extract_answer",
    "final_answer",
    "has_box",
    "numbers_match",
]
