"""`Problem`: a question and its answer, before it is worded as a prompt."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question with its only right answer."""

    key: str
    """Names the problem, however it is put: `3+5` and `5+3` alike. Its hash decides the split."""
    question: str
    answer: str


Template = Callable[[Random], tuple[str, int | str]]
"""Draws one question and its answer."""


def draw_from(templates: Sequence[Template], rng: Random) -> Problem:
    """Draw a problem from one template, again until its answer is not among its own numbers."""
    template = rng.choice(templates)
    while True:
        question, answer = template(rng)
        if str(answer) not in _NUMBER.findall(question):
            return Problem(key=question, question=question, answer=str(answer))
