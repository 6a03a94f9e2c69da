"""Digit level: two numbers and an operator, as short as `12+34=`."""

from random import Random

from telescope_env_telescope_math_reasoning.problem import Problem


def draw_digits(rng: Random, *, operations: str, max_digits: int) -> Problem:
    """Draw a sum, difference, product or exact quotient of numbers of up to `max_digits` digits."""
    largest = 10**max_digits - 1
    operator = rng.choice(operations)
    left, right = rng.randint(0, largest), rng.randint(0, largest)
    if operator == "/":
        right = rng.randint(1, largest)
        left = right * rng.randint(0, largest // right)
    results = {"+": left + right, "-": left - right, "*": left * right}
    answer = left // right if operator == "/" else results[operator]
    return Problem(
        key=_key(left, operator, right),
        question=f"{left}{operator}{right}=",
        answer=str(answer),
    )


def _key(left: int, operator: str, right: int) -> str:
    """Name `3+5` and `5+3` alike, so that the held-out split never holds a mirrored problem."""
    if operator in "+*":
        left, right = min(left, right), max(left, right)
    return f"{left}{operator}{right}"
