"""Making puzzles that have a solution, and finding the one canonical solution of a puzzle.

Canonical = the shortest text, then the first in the order of `_RANK`, among the expressions of a
fixed search. Equal puzzles have equal solutions, so supervised targets never contradict.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3
_RANK = {character: rank for rank, character in enumerate("0123456789+-*/()")}
_MAX_SEARCH = 20_000
"""All expressions of four numbers, all operators; with more numbers the first hit after it wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """Numbers, ascending, and the target to reach."""

    numbers: tuple[int, ...]
    target: int

    @property
    def text(self) -> str:
        """`3 5 8=16`."""
        return f"{' '.join(str(number) for number in self.numbers)}={self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    value: Fraction
    text: str
    precedence: int


def draw_puzzle(
    rng: random.Random,
    *,
    num_numbers: tuple[int, int],
    max_number: int,
    max_target: int,
    operations: str,
    use_all: bool,
) -> Puzzle:
    """Draw a puzzle that has a solution: numbers are combined at random until a target fits."""
    while True:
        count = rng.randint(*num_numbers)
        numbers = tuple(sorted(rng.randint(1, max_number) for _ in range(count)))
        used = count if use_all else rng.randint(2, count)
        target = _combine(rng, rng.sample(numbers, used), operations)
        if target is None or not 1 <= target <= max_target:
            continue
        if use_all or target not in numbers:
            return Puzzle(numbers=numbers, target=target)


def solve(puzzle: Puzzle, *, operations: str, use_all: bool) -> str | None:
    """Return the canonical solution; None when there is none."""
    sizes = [len(puzzle.numbers)] if use_all else range(2, len(puzzle.numbers) + 1)
    for size in sizes:
        best = _best(_expressions(puzzle.numbers, size, operations), puzzle.target)
        if best is not None:
            return best
    return None


def _best(expressions: Iterator[_Term], target: int) -> str | None:
    best: str | None = None
    for searched, term in enumerate(expressions):
        if term.value == target and (best is None or _order(term.text) < _order(best)):
            best = term.text
        if best is not None and searched > _MAX_SEARCH:
            break
    return best


def _order(text: str) -> tuple[int, list[int]]:
    return len(text), [_RANK[character] for character in text]


def _combine(rng: random.Random, values: list[int], operations: str) -> int | None:
    while len(values) > 1:
        left = values.pop(rng.randrange(len(values)))
        right = values.pop(rng.randrange(len(values)))
        operator = rng.choice(operations)
        if operator == "-":
            left, right = max(left, right), min(left, right)
        if operator == "/" and (right == 0 or left % right):
            return None
        results = {"+": left + right, "-": left - right, "*": left * right}
        values.append(left // right if operator == "/" else results[operator])
    return values[0]


def _expressions(numbers: Sequence[int], size: int, operations: str) -> Iterator[_Term]:
    subsets = sorted(set(combinations(numbers, size)))
    for subset in subsets:
        terms = [_Term(value=Fraction(n), text=str(n), precedence=_ATOM) for n in subset]
        yield from _all_combinations(terms, operations)


def _all_combinations(terms: list[_Term], operations: str) -> Iterator[_Term]:
    if len(terms) == 1:
        yield terms[0]
        return
    for first, second in combinations(range(len(terms)), 2):
        rest = [term for index, term in enumerate(terms) if index not in (first, second)]
        for joined in _joins(terms[first], terms[second], operations):
            yield from _all_combinations([*rest, joined], operations)


def _joins(one: _Term, two: _Term, operations: str) -> Iterator[_Term]:
    low, high = sorted((one, two), key=lambda term: (-term.precedence, _order(term.text)))
    for operator in operations:
        if operator in "+*":
            yield _join(low, operator, high)
        else:
            for left, right in ((one, two), (two, one)):
                if operator == "-" or right.value:
                    yield _join(left, operator, right)


def _join(left: _Term, operator: str, right: _Term) -> _Term:
    precedence = _PRECEDENCE[operator]
    left_text = left.text if left.precedence >= precedence else f"({left.text})"
    binds_right = right.precedence > precedence or (
        right.precedence == precedence and operator in "+*"
    )
    right_text = right.text if binds_right else f"({right.text})"
    values = {
        "+": left.value + right.value,
        "-": left.value - right.value,
        "*": left.value * right.value,
    }
    value = left.value / right.value if operator == "/" else values[operator]
    return _Term(value=value, text=f"{left_text}{operator}{right_text}", precedence=precedence)
