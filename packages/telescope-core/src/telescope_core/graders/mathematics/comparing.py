"""The program of a helper process: compares two formulas with `math-verify`, within limits.

It reads one pair as JSON from each line of its input and writes one line of JSON for it. A pair
that takes more processor time than it may ends the process: a timer of the kernel does that, so no
code can be busy in a way that the timer does not see. The process ends when its input does.
"""

import json
import logging
import re
import resource
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib import import_module
from typing import Any, cast

from telescope_core.base.process_facts import limit_addresses
from telescope_core.graders.mathematics.notation import GROUPED

MEMORY_BYTES = 4 * 2**30
"""Address space of a helper process; an answer that needs more is not equal."""
CPU_LIMIT_SIGNAL = signal.SIGPROF
"""Signal that ends the process when a pair has used up its processor time."""
_POINTS = ((3, 7), (-5, 11), (17, 4), (-2, 9))
"""Points at which equal formulas must agree: for each, the first fraction and its step."""
_DIGITS, _CLOSE = 30, 10**12
"""Values agree when their difference is smaller than the larger of them by this factor."""
_MORE_DIGITS, _CLOSER = 1300, 10**1100
"""The same for values that agree so far. Exponents are at most 1000, so that `\\sqrt{10^{1000}+1}`,
which differs from `10^{500}` by one part in `10^{1000}`, is the closest that can be written."""
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)")
_IMAGINARY = re.compile(r"(?<![\\A-Za-z])i(?![A-Za-z])")
_SLASH = re.compile(
    r"(?P<raised>[\^_/] *)?(?<![0-9.\]])"
    r"(?P<top>[0-9]+(?:\.[0-9]+)?|\\sqrt *\{[0-9]+\}) */ *(?P<bottom>[0-9]+(?:\.[0-9]+)?)"
    r"(?= *(?:[A-Za-z(\[|]|\\[A-Za-z]))"
)
"""A fraction with a slash in front of a factor: `1/2x` is half of x."""
_MIXED = re.compile(
    r"(?P<raised>[\^_] *)?(?<![0-9.\]])(?P<whole>[0-9]+)"
    r"(?: *\\frac *\{ *(?P<top>[0-9]+) *\} *\{ *(?P<bottom>[0-9]+) *\}"
    r"| +(?P<top_2>[0-9]+)/(?P<bottom_2>[0-9]+)(?! *[0-9.!^_/]))"
)
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?|[A-Za-z]) *\\degree")


class Verdict(StrEnum):
    """The result of a comparison."""

    EQUAL = "equal"
    """Both have the same value."""
    DIFFERENT = "different"
    """Both can be read, and have different values."""
    UNREADABLE = "unreadable"
    """One of them cannot be read, or the comparison took too long, so that it cannot be graded."""


def main() -> None:
    """Serve one parent: pairs on standard input, answers on standard output."""
    limit_addresses(MEMORY_BYTES, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(CPU_LIMIT_SIGNAL, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        import_module("math_verify")
    except ImportError as error:
        _say({"problem": str(error)})
        return
    # It warns that its own time limits are off: they are, since the timer here takes their place.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _say({"is_ready": True})
    for line in sys.stdin:
        answer, right, limit_s = cast(tuple[str, str, float], json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            verdict = compare(answer, right)
        except Exception:  # noqa: BLE001 - whatever a parser raises about it, it cannot be read
            verdict = Verdict.UNREADABLE
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say({"verdict": verdict})


def compare(answer: str, right: str) -> Verdict:
    """Return whether two formulas have the same value; there are no limits on time or memory.

    Units are removed before: math-verify would take `5t` for 5. Decimals are exact. Formulas that
    it calls equal must also agree in value, because it takes numbers below 1e-15 for zero.
    """
    math_verify: Any = import_module("math_verify.grader")
    # sympy asks what it knows of an expression in a random order, and a few answers depend on it.
    import_module("sympy.core.random").seed(0)
    texts = [_exact(text) for text in (right, answer)]
    is_real = not any(
        _IMAGINARY.search(text) or math_verify.should_treat_as_complex(text) for text in texts
    )
    gold, given = (_parsed(text, is_real=is_real) for text in texts)
    if gold is None or given is None:
        return Verdict.UNREADABLE
    is_equal = math_verify.verify(gold, given, timeout_seconds=0, allow_set_relation_comp=True)
    if not is_equal and _is_with_symbol(gold, given):
        sympy: Any = import_module("sympy")
        is_equal = _agree(gold, given) and sympy.simplify(gold - given) == 0
    return Verdict.EQUAL if is_equal and _agree(gold, given) else Verdict.DIFFERENT


def _exact(text: str) -> str:
    """Return `text` with decimals, mixed numbers and `1/2x` as fractions; degrees in radians."""
    plain = GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    plain = _MIXED.sub(_mixed, _SLASH.sub(_slash, plain))
    plain = _DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", plain)
    return _DECIMAL.sub(
        lambda found: f"\\frac{{{int(found[1] + found[2])}}}{{{10 ** len(found[2])}}}", plain
    )


def _slash(found: "re.Match[str]") -> str:
    return found[0] if found["raised"] else f"\\frac{{{found['top']}}}{{{found['bottom']}}}"


def _mixed(found: "re.Match[str]") -> str:
    top, bottom = found["top"] or found["top_2"], found["bottom"] or found["bottom_2"]
    if found["raised"] or not 0 < int(top) < int(bottom):
        return found[0]
    return f"({found['whole']}+\\frac{{{top}}}{{{bottom}}})"


def _parsed(text: str, *, is_real: bool) -> Any:
    """Return sympy's formula; None for an empty one. Raises if it cannot be read."""
    latex: Any = import_module("latex2sympy2_extended.latex2sympy2")
    sympy: Any = import_module("sympy")
    config = latex.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
    )
    plain = latex.normalize_latex(text, config)
    found: Any = latex.latex2sympy(
        plain,
        is_real=is_real,
        convert_degrees=False,
        normalization_config=None,
        conversion_config=latex.ConversionConfig(lowercase_symbols=False),
    )
    if is_real or not isinstance(found, sympy.Expr):
        return found
    return found.subs({one: sympy.I for one in found.free_symbols if str(one) == "i"})


def _is_with_symbol(one: Any, other: Any) -> bool:
    """Return whether one of two expressions is a lone symbol, which math-verify reads by name."""
    sympy: Any = import_module("sympy")
    sides = (one, other)
    return all(isinstance(side, sympy.Expr) for side in sides) and any(
        isinstance(side, sympy.Symbol) for side in sides
    )


def _agree(one: Any, other: Any) -> bool:
    """Return whether two expressions have the same value at each point where both have one."""
    sympy: Any = import_module("sympy")
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return True
    # Of integrals, sums and rounded numbers no more digits are to be had, at least not in time.
    vague = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Float)
    is_vague = one.has(*vague) or other.has(*vague)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    for first, step in _POINTS if symbols else _POINTS[:1]:
        point = {symbol: sympy.Rational(first + 2 * at, step) for at, symbol in enumerate(symbols)}
        try:
            sides = [side.subs(point).doit() for side in (one, other)]
            is_off = _differ(sides, _DIGITS, _CLOSE) or (
                not is_vague and sides[0] != sides[1] and _differ(sides, _MORE_DIGITS, _CLOSER)
            )
        except (TypeError, ValueError, OverflowError):
            continue  # no number there, such as a logarithm of zero
        if is_off:
            return False
    return True


def _differ(sides: Sequence[Any], num_digits: int, close: int) -> bool:
    """Return whether two numbers differ, in that many digits."""
    sympy: Any = import_module("sympy")
    values = [side.evalf(num_digits, maxn=2 * num_digits) for side in sides]
    if values[0] != values[1] and not {sympy.oo, -sympy.oo}.isdisjoint(values):
        return True
    sizes = [abs(value) for value in (*values, values[0] - values[1])]
    return all(size.is_finite for size in sizes) and bool(sizes[2] > max(sizes[:2]) / close)


def _say(what: object) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()
