"""Competition level: algebra, number theory, counting and probability with exact answers."""

from fractions import Fraction
from math import comb, gcd, lcm
from random import Random

from telescope_env_telescope_math_reasoning.problem import Problem, Template, draw_from


def draw_competition(rng: Random) -> Problem:
    """Draw one problem."""
    return draw_from(_TEMPLATES, rng)


def _linear_system(rng: Random) -> tuple[str, int]:
    x, y = rng.randint(-12, 12), rng.randint(-12, 12)
    a, b, c, d = (rng.choice([n for n in range(-9, 10) if n]) for _ in range(4))
    while a * d == b * c:
        d += 1 if d != -1 else 2
    first, second = _linear(a, b), _linear(c, d)
    return (
        f"The real numbers $x$ and $y$ satisfy ${first}={a * x + b * y}$ and "
        f"${second}={c * x + d * y}$. Find $x+y$."
    ), x + y


def _linear(a: int, b: int) -> str:
    return f"{_coefficient(a)}x{'+' if b > 0 else '-'}{_coefficient(abs(b))}y"


def _coefficient(a: int) -> str:
    return {1: "", -1: "-"}.get(a, str(a))


def _vieta(rng: Random) -> tuple[str, int]:
    total, product = rng.randint(3, 25), rng.randint(-30, 30) or 7
    sign = "+" if product > 0 else "-"
    return (
        f"Let $r$ and $s$ be the roots of $x^2-{total}x{sign}{abs(product)}=0$. Find $r^2+s^2$."
    ), total * total - 2 * product


def _power_remainder(rng: Random) -> tuple[str, int]:
    base, exponent, modulus = rng.randint(2, 30), rng.randint(20, 500), rng.randint(7, 60)
    return (f"What is the remainder when ${base}^{{{exponent}}}$ is divided by ${modulus}$?"), pow(
        base, exponent, modulus
    )


def _count_divisors(rng: Random) -> tuple[str, int]:
    primes = rng.sample((2, 3, 5, 7, 11), 3)
    exponents = [rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 2)]
    number, divisors = 1, 1
    for prime, exponent in zip(primes, exponents, strict=True):
        number *= prime**exponent
        divisors *= exponent + 1
    return f"How many positive divisors does ${number}$ have?", divisors


def _two_congruences(rng: Random) -> tuple[str, int]:
    first, second = rng.choice(((5, 7), (7, 9), (8, 11), (9, 13), (11, 12), (7, 16), (13, 15)))
    number = rng.randint(max(first, second), first * second - 1)
    return (
        f"Find the smallest positive integer that leaves remainder ${number % first}$ when "
        f"divided by ${first}$ and remainder ${number % second}$ when divided by ${second}$."
    ), number


def _gcd_from_lcm(rng: Random) -> tuple[str, int]:
    shared = rng.randint(2, 30)
    left, right = shared * rng.randint(2, 20), shared * rng.randint(2, 20)
    return (
        f"Two positive integers have product ${left * right}$ and least common multiple "
        f"${lcm(left, right)}$. Find their greatest common divisor."
    ), gcd(left, right)


def _lattice_paths(rng: Random) -> tuple[str, int]:
    right, up = rng.randint(3, 8), rng.randint(3, 8)
    via_x, via_y = rng.randint(1, right - 1), rng.randint(1, up - 1)
    paths = comb(via_x + via_y, via_x) * comb(right - via_x + up - via_y, right - via_x)
    return (
        f"A path on the integer grid goes from $(0,0)$ to $({right},{up})$ by steps of length 1 "
        f"to the right or up. How many such paths pass through $({via_x},{via_y})$?"
    ), paths


def _committee(rng: Random) -> tuple[str, int]:
    teachers, students, size = rng.randint(3, 7), rng.randint(5, 10), rng.randint(3, 5)
    return (
        f"A committee of ${size}$ people is chosen from ${teachers}$ teachers and ${students}$ "
        f"students. How many committees contain at least one teacher?"
    ), comb(teachers + students, size) - comb(students, size)


def _stars_and_bars(rng: Random) -> tuple[str, int]:
    total, parts = rng.randint(8, 20), rng.randint(3, 5)
    unknowns = "+".join(f"x_{index}" for index in range(1, parts + 1))
    return (
        f"How many solutions in positive integers does the equation ${unknowns}={total}$ have?"
    ), comb(total - 1, parts - 1)


def _arithmetic_series(rng: Random) -> tuple[str, int]:
    first, step, count = rng.randint(1, 40), rng.randint(2, 15), rng.randint(10, 60)
    last = first + (count - 1) * step
    return (
        f"Find the sum of the arithmetic progression ${first}, {first + step}, "
        f"{first + 2 * step}, \\ldots, {last}$."
    ), count * (first + last) // 2


def _drawing_balls(rng: Random) -> tuple[str, str]:
    red, blue = rng.randint(3, 10), rng.randint(3, 10)
    chance = Fraction(comb(red, 2) + comb(blue, 2), comb(red + blue, 2))
    return (
        f"A bag holds ${red}$ red and ${blue}$ blue balls. Two balls are drawn at random without "
        f"replacement. What is the probability that they have the same colour? Give a fraction in "
        f"lowest terms."
    ), f"\\frac{{{chance.numerator}}}{{{chance.denominator}}}"


def _inverse_sum(rng: Random) -> tuple[str, str]:
    left, right = rng.sample(range(2, 25), 2)
    total = Fraction(1, left) + Fraction(1, right)
    return (
        f"One pump fills a tank in ${left}$ hours and another in ${right}$ hours. What fraction "
        f"of the tank do the two fill together in one hour? Give a fraction in lowest terms."
    ), f"\\frac{{{total.numerator}}}{{{total.denominator}}}"


def _circle_area(rng: Random) -> tuple[str, str]:
    radius, left, right = rng.choice(((5, 6, 8), (13, 10, 24), (10, 12, 16), (17, 16, 30)))
    scale = rng.randint(1, 6)
    return (
        f"A right triangle with legs ${left * scale}$ and ${right * scale}$ is inscribed in a "
        f"circle. Find the exact area of the circle in terms of $\\pi$."
    ), f"{(radius * scale) ** 2}\\pi"


def _larger_root(rng: Random) -> tuple[str, str]:
    middle, radicand = rng.randint(2, 15), rng.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15))
    constant = middle * middle - radicand
    return (
        f"Find the exact value of the larger solution of $x^2-{2 * middle}x"
        f"{'+' if constant >= 0 else '-'}{abs(constant)}=0$."
    ), f"{middle}+\\sqrt{{{radicand}}}"


def _line_through(rng: Random) -> tuple[str, str]:
    slope, start = rng.choice([n for n in range(-9, 10) if abs(n) > 1]), rng.randint(1, 20)
    left, right = rng.sample(range(-8, 9), 2)
    return (
        f"A line passes through $({left},{slope * left + start})$ and "
        f"$({right},{slope * right + start})$. Write its $y$ as an expression in $x$."
    ), f"{slope}x+{start}"


_TEMPLATES: tuple[Template, ...] = (
    _linear_system,
    _vieta,
    _power_remainder,
    _count_divisors,
    _two_congruences,
    _gcd_from_lcm,
    _lattice_paths,
    _committee,
    _stars_and_bars,
    _arithmetic_series,
    _drawing_balls,
    _inverse_sum,
    _circle_area,
    _larger_root,
    _line_through,
)
