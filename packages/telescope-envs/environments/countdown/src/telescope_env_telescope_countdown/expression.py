"""Reading one arithmetic expression: exactly + - * / ( ) and non-negative integers, never `eval`.

Grammar: sum = product (("+"|"-") product)*; product = atom (("*"|"/") atom)*;
atom = ("+"|"-") atom | integer | "(" sum ")". The signs of print for minus, times and division are
- * /. White space between tokens is ignored. Values are exact fractions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 32
_DIGITS = frozenset("0123456789")
_MAX_INTEGER_DIGITS = 9
_PRINTED = {"\u2212": "-", "\u00d7": "*", "\u00f7": "/"}


class ExpressionError(ValueError):
    """The text is not an expression of the grammar, or divides by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """What an expression is worth and what it is made of."""

    value: Fraction
    numbers: tuple[int, ...]
    """The integers in it, left to right."""
    operators: str
    """The operators between two parts, left to right."""
    signs: str
    """The signs before one part, left to right."""


def parse_expression(text: str) -> Expression:
    """Parse and evaluate `text`; raises ExpressionError saying what is wrong."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    parser = _Parser(list(_tokens(text)))
    value = parser.sum(depth=0)
    if parser.peek():
        raise ExpressionError(f"unexpected {parser.peek()!r}")
    return Expression(
        value=value,
        numbers=tuple(parser.numbers),
        operators="".join(parser.operators),
        signs="".join(parser.signs),
    )


def _tokens(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + 1
        if text[start] in _DIGITS:
            while end < len(text) and text[end] in _DIGITS:
                end += 1
            if end - start > _MAX_INTEGER_DIGITS:
                raise ExpressionError(f"an integer of more than {_MAX_INTEGER_DIGITS} digits")
            yield text[start:end]
        elif text[start] in "+-*/()" or text[start] in _PRINTED:
            yield _PRINTED.get(text[start], text[start])
        elif not text[start].isspace():
            raise ExpressionError(f"unexpected character {text[start]!r}")
        start = end


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self.numbers: list[int] = []
        self.operators: list[str] = []
        self.signs: list[str] = []

    def peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise ExpressionError("it ends too early")
        self._next += 1
        return token

    def operator(self, choices: str) -> str:
        token = self.peek()
        if not token or token not in choices:
            return ""
        self.operators.append(token)
        return self.take()

    def sum(self, *, depth: int) -> Fraction:
        value = self.product(depth=depth)
        while operator := self.operator("+-"):
            right = self.product(depth=depth)
            value = value + right if operator == "+" else value - right
        return value

    def product(self, *, depth: int) -> Fraction:
        value = self.atom(depth=depth)
        while operator := self.operator("*/"):
            right = self.atom(depth=depth)
            if operator == "/" and not right:
                raise ExpressionError("division by zero")
            value = value * right if operator == "*" else value / right
        return value

    def atom(self, *, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"parentheses and signs deeper than {MAX_DEPTH}")
        token = self.take()
        if token in "+-":
            self.signs.append(token)
            value = self.atom(depth=depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth=depth + 1)
            if self.take() != ")":
                raise ExpressionError("a parenthesis is not closed")
            return value
        if token[0] not in _DIGITS:
            raise ExpressionError(f"unexpected {token!r}")
        self.numbers.append(int(token))
        return Fraction(int(token))
