"""Finding the answer in a completion and comparing it with the right one.

Numbers are compared exactly without a symbolic parser; everything else goes to `math-verify`.
Its time-outs use signals, which rewards cannot (they run in threads), so they are off and
`bounds.py` limits what it is given.
"""

import logging
import re
import threading
from fractions import Fraction
from typing import cast

from telescope_core.parsers import boxed_answer
from telescope_env_telescope_math_reasoning.bounds import is_cheap

_BOX = "\\boxed"
_MAX_COMPLETION = 100_000
_MAX_LINE = 2000
_NUMBER = re.compile(r"-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?", re.ASCII)
_PLAIN = re.compile(r"-?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:/0*[1-9][0-9]{0,39})?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[0-9]{1,40})\}\{(0*[1-9][0-9]{0,39})\}")
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_UNIT = re.compile(r"\s*\\(?:text|mathrm|mbox)\{[^{}]*\}|(?<=[0-9.])[\sA-Za-z%\\]+$", re.ASCII)
_VERIFY_LOCK = threading.Lock()
"""The parser behind `math-verify` keeps caches that are not made for threads."""


def extract_answer(completion: str) -> str:
    """Return the last boxed answer; without one, the last formula or number of the last line.

    Only what follows an equals sign counts there, so repeating `12+34=` answers nothing.
    """
    tail = completion[-_MAX_COMPLETION:]
    if _BOX in tail:
        return boxed_answer(tail) or ""
    lines = [line for line in tail.splitlines() if line.strip()]
    line = lines[-1][-_MAX_LINE:] if lines else ""
    formulas = [found.group(found.lastindex or 0) for found in _FORMULA.finditer(line)]
    if formulas:
        return formulas[-1].rpartition("=")[2].strip()
    numbers = _NUMBER.findall(line.rpartition("=")[2])
    return numbers[-1] if numbers else ""


def numbers_match(answer: str, right: str) -> bool:
    """Whether `answer` is a finished number, not a calculation, worth the same as `right`."""
    value, right_value = as_fraction(answer.rpartition("=")[2]), as_fraction(right)
    if value is None or value != right_value:
        return False
    return value.denominator > 1 or not ("/" in answer or "frac" in answer)


def expressions_match(answer: str, right: str) -> bool:
    """Whether `answer` is worth the same as `right`, symbolically."""
    if not answer.strip():
        return False
    value, right_value = as_fraction(answer), as_fraction(right)
    if value is not None and right_value is not None:
        return value == right_value
    return _plain_text(answer) == _plain_text(right) or (
        is_cheap(answer) and _verify(answer, right)
    )


def as_fraction(text: str) -> Fraction | None:
    r"""Return the value of `1,200`, `$5`, `-3`, `2.50`, `3/4`, `\frac{3}{4}`, `7 cm`; else None."""
    plain = _UNIT.sub("", _plain_text(text))
    fraction = _FRACTION.fullmatch(plain)
    if fraction:
        sign, top, bottom = fraction.groups()
        return Fraction(int(top), int(bottom)) * (-1 if sign else 1)
    if not _PLAIN.fullmatch(plain):
        return None
    top, _, bottom = plain.partition("/")
    return Fraction(top) / Fraction(bottom or "1")


def has_box(completion: str) -> bool:
    """Whether the completion boxes a non-empty answer."""
    return bool(boxed_answer(completion[-_MAX_COMPLETION:]))


def silence_timeout_warning() -> None:
    """Keep `math-verify` from warning that time-outs are off: they are, on purpose."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _plain_text(text: str) -> str:
    kept = re.sub(r"\\[!,;]|\\\$|(?<=\})\s+|\s+(?=\{)", "", text.strip())
    kept = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", kept.replace("$", ""))
    return kept.strip().rstrip(".")


def _verify(answer: str, right: str) -> bool:
    with _VERIFY_LOCK:
        # Importing it takes 0.3 s and 50 MB, which whoever only compares numbers need not spend.
        from math_verify import parse, verify

        gold = cast(list[str], parse(f"${right}$", parsing_timeout=0))
        given = cast(list[str], parse(f"${answer}$", parsing_timeout=0))
        return bool(gold and given) and verify([*gold], [*given], timeout_seconds=0)
