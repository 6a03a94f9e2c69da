"""How often the grader of mathematics is wrong, on pairs that are labelled by construction.

A pair is an answer and a right answer, made from one value in two forms (equal) or from two values
(different), in eight categories. Each form is written here without the grader's code. The peer is
math-verify with its own defaults, given both as formulas between dollars.
Run: python benchmarks/bench_grading.py
"""

import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from machine import facts_of_run, table, write_results

from telescope_core.graders.mathematics import MathGrader, Verdict

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_grading.py"
NUM_PAIRS, SEED = 1000, 20261126
MINUS = "\u2212"
Draw = Callable[[random.Random], tuple[list[str], list[str]]]
"""Returns texts of one value, and texts of other values."""


class Pair(NamedTuple):
    """An answer, the right one, and whether they are worth the same."""

    category: str
    answer: str
    right: str
    is_equal: bool


def _whole(rng: random.Random) -> tuple[list[str], list[str]]:
    n = rng.randint(1000, 99_999_999)
    groups = f"{n:,}"
    same = [str(n), groups, groups.replace(",", "{,}"), groups.replace(",", "\\,")]
    same += [groups.replace(",", " "), f"+{n}", f"{n}.0", f"({n})", f"\\mathbf{{{n}}}", f"x = {n}"]
    wrong = [f"-{n}", str(n + 1), str(10 * n), f"{n}x", f"{n}\\pi", f"{n}i", f"{n} thousand"]
    return same, [*wrong, f"{n}!", str(n)[::-1] if str(n) != str(n)[::-1] else str(n + 2)]


def _decimal(rng: random.Random) -> tuple[list[str], list[str]]:
    digits, places = rng.randint(101, 9999), rng.randint(1, 3)
    if digits % 10 == 0:
        digits += 1
    value = Fraction(digits, 10**places)
    plain = f"{digits / 10**places:.{places}f}"
    same = [plain, f"{plain}0", f"\\frac{{{value.numerator}}}{{{value.denominator}}}"]
    same += [f"{digits} \\times 10^{{-{places}}}", f"{digits}e-{places}", f"{digits}/{10**places}"]
    wrong = [f"-{plain}", f"{MINUS}{plain}", f"{digits}e{places}", f"{plain}1", f"{plain}y"]
    return same, [*wrong, f"{digits} \\times 10^{{{places}}}", str(digits)]


def _fraction(rng: random.Random) -> tuple[list[str], list[str]]:
    bottom = rng.randint(3, 40)
    top = rng.choice([n for n in range(1, bottom) if Fraction(n, bottom).denominator == bottom])
    whole, k = rng.randint(1, 30), rng.randint(2, 6)
    over = whole * bottom + top
    same = [f"\\frac{{{over}}}{{{bottom}}}", f"{over}/{bottom}", f"\\dfrac{{{over}}}{{{bottom}}}"]
    same += [f"{whole}\\frac{{{top}}}{{{bottom}}}", f"{whole} {top}/{bottom}"]
    same += [f"\\frac{{{k * over}}}{{{k * bottom}}}", f"-\\frac{{-{over}}}{{{bottom}}}"]
    wrong = [f"\\frac{{{bottom}}}{{{over}}}", f"-\\frac{{{over}}}{{{bottom}}}", f"{over}{bottom}"]
    wrong += [f"{whole + 1}\\frac{{{top}}}{{{bottom}}}", f"\\frac{{{over + 1}}}{{{bottom}}}"]
    return same, [*wrong, f"\\frac{{{over}}}{{{bottom}}}\\pi", f"\\frac{{{over}x}}{{{bottom}}}"]


def _with_unit(rng: random.Random) -> tuple[list[str], list[str]]:
    n = rng.randint(3, 95)
    kind = rng.choice(["percent", "degrees", "length", "money", "speed"])
    if kind == "percent":
        same = [
            f"{n}\\%",
            f"{n}%",
            f"{n}\\text{{ percent}}",
            f"{n / 100:.2f}",
            f"\\frac{{{n}}}{{100}}",
        ]
        return same, [f"{n + 1}\\%", f"-{n}\\%", f"{n}0\\%", f"{n / 10:.1f}", f"{n}\\%x"]
    if kind == "degrees":
        same = [f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n}\u00b0", f"{n}\\text{{ degrees}}", str(n)]
        return same, [
            f"{n + 1}^\\circ",
            f"{n}\\pi",
            f"\\sin {n}^\\circ",
            f"-{n}^\\circ",
            f"{n}\\theta",
        ]
    if kind == "length":
        same = [f"{n}\\text{{ km}}", f"{n} km", f"{n}\\mathrm{{km}}", f"{n}\\text{{ kilometers}}"]
        same.append(f"{1000 * n}\\text{{ m}}")
        return same, [
            f"{n}\\text{{ mi}}",
            f"{n}\\text{{ cm}}",
            f"{n}\\text{{ km}}^2",
            f"{n + 1} km",
        ]
    if kind == "money":
        same = [
            f"\\${n}",
            f"${n}",
            f"{n}\\text{{ dollars}}",
            f"\\${n}.00",
            f"{100 * n}\\text{{ cents}}",
        ]
        return same, [
            f"{n}\\text{{ cents}}",
            f"-\\${n}",
            f"\\${n + 1}",
            f"\\${n}\\text{{ million}}",
        ]
    same = [
        f"{n}\\text{{ mph}}",
        f"{n}\\text{{ miles per hour}}",
        str(n),
        f"{n}\\text{{ miles/hour}}",
    ]
    return same, [
        f"{n + 1}\\text{{ mph}}",
        f"{n}t",
        f"{2 * n}\\text{{ mph}}",
        f"{n} \\text{{ or }} 1",
    ]


def _several(rng: random.Random) -> tuple[list[str], list[str]]:
    a, b, c = rng.sample(range(-30, 60), 3)
    same = [f"{a}, {b}, {c}", f"\\{{{a}, {b}, {c}\\}}", f"{c}, {a}, {b}", f"\\{{{b},{c},{a}\\}}"]
    same += [f"{a}, {b}\\text{{ and }}{c}", f"{a}, {b} or {c}", f"x={a}, x={b}, x={c}"]
    wrong = [f"{a}, {b}", f"{a}, {b}, {c + 1}" if c + 1 not in (a, b) else f"{a}, {b}, 99"]
    wrong += [f"{a}{abs(b)}{abs(c)}", f"\\{{{a}, {b}, {c}, 77\\}}", str(a), f"{a}x, {b}, {c}"]
    return same, [*wrong, f"{a}, {b}, {c}\\pi" if c else f"{a}, {b}, \\pi"]


def _in_brackets(rng: random.Random) -> tuple[list[str], list[str]]:
    a, b = rng.sample(range(-20, 40), 2)
    if rng.random() < 0.5:
        same = [f"({a}, {b})", f"({a},{b})", f"\\left({a}, {b}\\right)", f"({a}.0, {b})"]
        same += [f"(x, y) = ({a}, {b})", f"({a}, \\frac{{{2 * b}}}{{2}})"]
        wrong = [
            f"({b}, {a})",
            f"[{a}, {b}]",
            f"({a}, {b + 1})",
            f"({a}, {b}, 0)",
            f"({-a - 1}, {b})",
        ]
        return same, [*wrong, f"{a}{abs(b)}"]
    a, b = min(a, b), max(a, b)
    same = [f"[{a}, {b})", f"\\left[{a}, {b}\\right)", f"{a} \\le x < {b}", f"x \\in [{a}, {b})"]
    same += [f"[{a}.0, {b})", f"{b} > x \\ge {a}"]
    wrong = [f"({a}, {b}]", f"[{a}, {b}]", f"({a}, {b})", f"[{a}, {b + 1})", f"[{b}, {a})"]
    return same, [*wrong, f"{a} < x < {b}", f"[{a}, \\infty)"]


def _constant(rng: random.Random) -> tuple[list[str], list[str]]:
    n, square = rng.randint(2, 40), rng.randint(2, 9)
    if rng.random() < 0.5:
        same = [
            f"{n}\\pi",
            f"{n} \\pi",
            f"\\pi \\cdot {n}",
            f"{n}\u03c0",
            f"\\frac{{{2 * n}\\pi}}{{2}}",
        ]
        wrong = [
            str(n),
            f"{n}\\pi^2",
            f"-{n}\\pi",
            f"{n + 1}\\pi",
            f"{n}e",
            f"{3.14159265 * n:.6f}",
        ]
        return same, wrong
    root = rng.choice([2, 3, 5, 7, 11])
    same = [
        f"{square}\\sqrt{{{root}}}",
        f"\\sqrt{{{square * square * root}}}",
        f"{square}\\sqrt {root % 10}" if root < 10 else f"{square} \\sqrt{{{root}}}",
    ]
    same += [f"\\frac{{{square * root}}}{{\\sqrt{{{root}}}}}", f"{square} \\cdot {root}^{{1/2}}"]
    wrong = [
        f"-{square}\\sqrt{{{root}}}",
        f"{square}\\sqrt{{{root + 1}}}",
        f"\\sqrt{{{square * root}}}",
    ]
    return same, [
        *wrong,
        str(square * root),
        f"{square * root**0.5:.6f}",
        f"{square}\\sqrt[3]{{{root}}}",
    ]


def _polynomial(rng: random.Random) -> tuple[list[str], list[str]]:
    p, q = rng.sample(range(1, 12), 2)
    same = [f"(x+{p})(x+{q})", f"x^2+{p + q}x+{p * q}", f"{p * q}+{p + q}x+x^2"]
    same += [f"(x+{q})(x+{p})", f"x(x+{p + q})+{p * q}", f"x^{{2}} + {p + q} \\cdot x + {p * q}"]
    wrong = [f"x^2-{p + q}x+{p * q}", f"(x-{p})(x-{q})", f"y^2+{p + q}y+{p * q}", str(p * q)]
    return same, [
        *wrong,
        f"x^2+{p + q}x+{p * q + 1}",
        f"x^3+{p + q}x+{p * q}",
        f"X^2+{p + q}X+{p * q}",
    ]


CATEGORIES: dict[str, Draw] = {
    "whole numbers": _whole,
    "decimals": _decimal,
    "fractions": _fraction,
    "units": _with_unit,
    "lists and sets": _several,
    "tuples and intervals": _in_brackets,
    "constants and roots": _constant,
    "polynomials": _polynomial,
}


def pairs(count: int, seed: int = SEED) -> Iterator[Pair]:
    """Yield `count` pairs, half of them equal, in turn from each category."""
    rng = random.Random(seed)
    names = list(CATEGORIES)
    for index in range(count):
        category = names[index % len(names)]
        is_equal = (index // len(names)) % 2 == 0
        same, wrong = CATEGORIES[category](rng)
        right = rng.choice(same)
        answer = rng.choice([text for text in same if text != right] if is_equal else wrong)
        yield Pair(category, answer, right, is_equal)


def by_math_verify(answer: str, right: str) -> bool:
    """Return what math-verify says with its own defaults."""
    from math_verify import parse, verify

    return verify(parse(f"${right}$"), parse(f"${answer}$"))


def measure(
    judged: Callable[[str, str], bool], chosen: Sequence[Pair]
) -> tuple[list[bool], list[float]]:
    """Return what a grader says of each pair, and the seconds that each took."""
    said: list[bool] = []
    took_s: list[float] = []
    for pair in chosen:
        started_s = time.perf_counter()
        said.append(judged(pair.answer, pair.right))
        took_s.append(time.perf_counter() - started_s)
    return said, took_s


def rates(said: Sequence[bool], chosen: Sequence[Pair]) -> tuple[float, float]:
    """Return the shares of all pairs that are wrongly equal, and wrongly different."""
    wrongly = [(one, pair.is_equal) for one, pair in zip(said, chosen, strict=True)]
    return (
        sum(one and not label for one, label in wrongly) / len(chosen),
        sum(label and not one for one, label in wrongly) / len(chosen),
    )


def main() -> None:
    """Grade every pair with both, and write the results."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    facts = facts_of_run(COMMAND, "telescope-core", "math-verify")
    chosen = list(pairs(NUM_PAIRS))
    grader = MathGrader()
    grader.are_equal("x+1", "1+x")  # starts the helper
    by_math_verify("x+1", "1+x")
    results = {
        "ours": measure(grader.are_equal, chosen),
        "math-verify": measure(by_math_verify, chosen),
    }
    unreadable = sum(
        grader.compare(pair.answer, pair.right) is Verdict.UNREADABLE for pair in chosen
    )
    grader.close()
    total, rows, lines = [], [], []
    for name, (said, took_s) in results.items():
        equal, different = rates(said, chosen)
        mean_ms, median_ms = statistics.mean(took_s) * 1e3, statistics.median(took_s) * 1e3
        total.append(
            [name, f"{equal:.1%}", f"{different:.1%}", f"{mean_ms:.1f}", f"{median_ms:.2f}"]
        )
    for category in CATEGORIES:
        mine = [at for at, pair in enumerate(chosen) if pair.category == category]
        line = [category, str(len(mine))]
        for said, _ in results.values():
            some = [chosen[at] for at in mine]
            equal, different = rates([said[at] for at in mine], some)
            line += [f"{round(equal * len(mine))}", f"{round(different * len(mine))}"]
        rows.append(line)
    for at, pair in enumerate(chosen):
        lines.append({**pair._asdict(), **{name: said[at] for name, (said, _) in results.items()}})
    missed = [line for line in lines if line["ours"] != line["is_equal"]]
    shown = [[f"`{one['answer']}`", f"`{one['right']}`", str(one["is_equal"])] for one in missed]
    kinds = [f"{name}: {kind}" for name in results for kind in ("equal", "different")]
    page = f"""# Grading of mathematics: pairs labelled by construction

{{facts}}

{NUM_PAIRS} pairs of an answer and the right one, half of them equal, seed {SEED}. Shares are of all
pairs. math-verify is asked with its defaults. Ours calls {unreadable} pairs not gradable, which
counts as different. Conventions of the labels: a unit that one side leaves out is no difference,
and 25% is 0.25.

{table(["grader", "wrongly equal", "wrongly different", "mean ms", "median ms"], total)}

## Wrong verdicts by category

{table(["category", "pairs", *kinds], rows)}

## What ours gets wrong

{table(["answer", "right", "are equal"], shown) if shown else "Nothing."}
"""
    write_results("grading", page, facts, lines)


if __name__ == "__main__":
    main()
