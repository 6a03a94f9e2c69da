"""Run a problem's own test on values that came out of a sandbox.

The tests are functions of asserts that call the candidate. A test is run twice here, outside of the
sandbox. The first time, once, the candidate is the problem's own solution, and the arguments of
every call are kept. The second time it gives the values that a model's program returned for these
arguments, which are of built-in types alone: no code of the program runs beside an assert.
"""

import builtins
import copy
import random
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any, cast

from telescope_env_telescope_humaneval.problems import Problem

Candidate = Callable[..., object]


@cache
def calls_of(problem: Problem) -> tuple[tuple[object, ...], ...]:
    """Return the arguments of every call that the test makes, in order."""
    calls: list[tuple[object, ...]] = []
    space = _space(problem)
    solve = cast(Candidate, space[problem.function])

    def candidate(*arguments: object) -> object:
        calls.append(copy.deepcopy(arguments))
        return solve(*arguments)

    _check(space, candidate)
    return tuple(calls)


def passes(problem: Problem, values: Sequence[object]) -> bool:
    """Return whether the test accepts `values`, one for each of its calls."""
    left = iter(copy.deepcopy(list(values)))

    def candidate(*_: object) -> object:
        return next(left)

    try:
        _check(_space(problem), candidate)
    except Exception:  # noqa: BLE001 - whatever a test raises about a value, it has not passed
        return False
    return True


def _check(space: dict[str, object], candidate: Candidate) -> None:
    cast(Callable[[Candidate], None], space["check"])(candidate)


@cache
def _code_of(problem: Problem) -> CodeType:
    text = f"{problem.prompt}{problem.solution}\n{problem.test}"
    return compile(text, problem.id, "exec")


def _space(problem: Problem) -> dict[str, object]:
    """Return the names that the test uses, among them the prompt's helpers and its own solution.

    It is a namespace that prints nothing and whose `random` is its own, and always the same.

    Four tests draw their arguments. They have to draw the same ones both times, and must not move
    the generator that the rest of this process shares.
    """
    drawn = random.Random(problem.id)
    own = SimpleNamespace(
        Random=random.Random, randint=drawn.randint, choice=drawn.choice, random=drawn.random
    )

    def imported(name: str, *more: Any) -> object:
        return own if name == "random" else __import__(name, *more)

    def silent(*_: object) -> None:
        pass

    inside: dict[str, object] = {**vars(builtins), "__import__": imported, "print": silent}
    space: dict[str, object] = {"__builtins__": inside, "__name__": "humaneval"}
    exec(_code_of(problem), space)
    return space
