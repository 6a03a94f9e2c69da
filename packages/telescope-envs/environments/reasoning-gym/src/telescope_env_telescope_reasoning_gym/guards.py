"""Which answers may reach a verifier that evaluates them as Python.

Some verifiers call `eval`, others sympy's parser, which does the same. What the policy writes there
is code: it could call anything, or compute `9**9**9` and hold the process for ever. Only values and
arithmetic of a bounded size get through.
"""

import ast
import math
import re

EVALUATES_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATES_ARITHMETIC = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
MAX_BITS = 512
"""Of a number that the arithmetic may lead to; a variable counts as one bit."""
_MAX_CHARACTERS = 2000
_TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"}
_FUNCTIONS = _TRIGONOMETRIC | {"sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
_LIST_TEXT = re.compile(r"[\w\s,.\[\]'\"-]*")
"""Brackets, text and numbers: without parentheses and operators nothing is called or computed."""


def may_be_judged(task: str, answer: str) -> bool:
    """Whether the verifier of `task` can be given `answer` without running what it says."""
    if task in EVALUATES_LISTS:
        return _LIST_TEXT.fullmatch(answer) is not None
    if task not in EVALUATES_ARITHMETIC:
        return True
    if len(answer) > _MAX_CHARACTERS:
        return False
    try:
        bits = _bits(ast.parse(answer.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bits is not None and bits <= MAX_BITS


def _bits(node: ast.expr) -> int | None:
    """Return about how many bits the value of `node` needs; None when it may not be computed."""
    match node:
        case ast.Constant(value=int() | float() as value):
            # A literal such as 1e400 is infinite, and has no bits to count.
            return None if value == math.inf else int(value).bit_length() + 1
        case ast.Name():
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _bits(operand)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _bits(argument)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _bits(left), _exponent(right)
            return None if base is None or exponent is None else base * exponent
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            first, second = _bits(left), _bits(right)
            return None if first is None or second is None else first + second
        case _:
            return None


def _exponent(node: ast.expr) -> int | None:
    """Return the size of a constant exponent, at least 1; that of `x**(1/2)` is 3."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= MAX_BITS:
            return max(1, int(abs(value)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            top, bottom = _exponent(left), _exponent(right)
            return None if top is None or bottom is None else top + bottom
        case ast.Name():
            return 1
        case _:
            return None
