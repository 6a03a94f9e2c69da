r"""Read values in the notations of answers: numbers, lists, sets, tuples, intervals. Pure.

`read_value` splits a text according to its structure. Parts that are not numbers are formulas,
which math-verify reads, or words, which are compared as they are.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from telescope_core.graders.mathematics.notation import (
    GREEK,
    GROUPED,
    MAX_CHARACTERS,
    bracketed,
    closing,
    normalized,
)
from telescope_core.graders.mathematics.numbers import Amount, read_amount
from telescope_core.graders.mathematics.units import Unit, split_unit

_MAX_DEPTH = 20
"""Brackets within brackets."""
_LETTER = rf"(?:\\(?:{'|'.join(sorted(GREEK))})(?![A-Za-z])|[A-Za-z])"
_NAME = re.compile(
    rf"(?:\\(?:text|overline|vec|hat|bar|mathcal) *\{{[^{{}}]*\}}"
    rf"|\\(?:angle|triangle|measuredangle) *[A-Z]{{1,3}}"
    rf"|m *\\angle *[A-Z]{{1,3}}|{_LETTER}|[A-Z]{{2,4}}|\|[A-Z]{{2}}\||\[[A-Z]{{3,5}}\])"
    r"(?: *_ *(?:\{[^{}]*\}|[A-Za-z0-9]))?(?:'{1,3}|\^ *\{? *(?:-1|\*) *\}?)? *(?:\([^()=]*\))?"
)
_EQUALS = re.compile(r"(?<![\\<>!=:])=(?!=)")
_ROUGHLY = re.compile(r"\\approx(?![A-Za-z])|\u2248")
_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>")
_BOTH = re.compile(
    r"\\text *\{ *and *\}|\\(?:land|wedge)(?![A-Za-z])|\u2227|(?<![\\A-Za-z{])and(?![A-Za-z])"
)
_BUILT = re.compile(
    rf"(?P<name>{_LETTER}) *(?:\\in *\\mathbb\{{R\}} *)?(?:\\mid(?![A-Za-z])|\||:)"
    r"(?P<condition>[^=|:]*)"
)
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,} +[A-Za-z]{2,}|[0-9] +[A-Za-z]{4,}")
_COUNTED = re.compile(r"([^A-Za-z]*[0-9]) *([A-Za-z][A-Za-z .\-]*)")
"""A number and what it counts, all of it in `\\text{...}`."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z \-']*")
_FUNCTIONS_WORDS = """
arccos arcsin arctan binom cos cot coth csc cosh exp frac gcd lcm lg ln log max min mod pi root
sec sech sin sinh sqrt tan tanh
"""
FUNCTIONS = frozenset(_FUNCTIONS_WORDS.split())
"""Names of functions and operations."""
_NUMERIC_WORDS = """
bmod cdot ceil choose dbinom degree div infty lceil lfloor lvert mid operatorname over pm pmod
rceil rfloor rvert tbinom text times vert { } |
"""
NUMERIC = FUNCTIONS | frozenset(_NUMERIC_WORDS.split())
"""Commands that a formula without variables may hold."""
_CANCELING = (NUMERIC | GREEK) - {"infty", "operatorname", "pm", "text"}
_NO_TERM = re.compile(r"[=<>',;]")
_LOWERED_NUMBER = re.compile(r"(?<![A-Za-z}_])[0-9]+ *_")
"""A number with a subscript base, such as `12_{34x}`, which math-verify takes for the number."""
_BASED_DIGITS = re.compile(r"(?=[0-9]*[A-Fa-f])([0-9A-Fa-f]{2,}) *_ *\{? *(1[1-6]) *\}?", re.ASCII)
"""A number of base 11 to 16 with letters among its digits."""
_SHORT_WORDS = {"yes", "no", "odd", "dne", "none", "all", "true", "both"}


class ValueKind(StrEnum):
    """The way in which the members of a group belong together."""

    LIST = "list"
    """Several values, in any order: `3, 5`."""
    SET = "set"
    r"""Braces: `\{3, 5\}`."""
    UNION = "union"
    r"""Joined by `\cup`, in any order."""
    MATRIX = "matrix"
    """Rows, which are groups of kind ROW."""
    ROW = "row"
    """A row of a matrix."""
    OPEN = "()"
    """A tuple, a point, or an interval without its ends."""
    CLOSED = "[]"
    """An interval with both ends."""
    LEFT_OPEN = "(]"
    """An interval with its right end."""
    RIGHT_OPEN = "[)"
    """An interval with its left end."""


_INTERVALS = {ValueKind.OPEN, ValueKind.CLOSED, ValueKind.LEFT_OPEN, ValueKind.RIGHT_OPEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Several values."""

    kind: ValueKind
    members: "tuple[Value, ...]"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A formula, to be read by a mathematics parser."""

    body: str
    """The formula without its unit."""
    unit: Unit | None
    text: str

    @property
    def has_variables(self) -> bool:
        """Whether a letter stands for an unknown."""
        return has_variables(self.body)

    @property
    def is_numeric(self) -> bool:
        """Whether it is surely a number: no variables, and only commands of arithmetic."""
        is_plain = not self.has_variables and "'" not in self.body
        return is_plain and set(_COMMAND.findall(self.body)) <= NUMERIC


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """An answer in words, or the letter of a choice."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A value with a name: `x = 3`."""

    name: str
    value: "Value"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Text that is neither a value nor a formula, such as a sentence."""

    text: str


Value = Amount | Grouped | Formula | Words | Named | Unreadable


def read_value(text: str) -> Value:
    """Return the value of `text`, normalizing it; long and deeply nested texts are not read."""
    if len(text) > MAX_CHARACTERS:
        return Unreadable(text=text)
    plain = normalized(text)
    depth = deepest = 0
    for _, step in bracketed(plain):
        depth += step
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        return Unreadable(text=plain)
    conditions = _BOTH.split(text.strip().strip("$"))
    both = _within([*map(normalized, conditions)]) if len(conditions) == 2 else None
    return both or _read(plain)


_CHOICE = re.compile(
    r"(?:\\text *\{ *\(?([A-J])[).] *\}|\\text *\{ *\(([A-J])\) +(?=[^{}]*\}$)"
    r"|\(([A-J])\) +|\(\\text *\{ *([A-J]) *\}\)|([A-J])[).] +) *(?P<rest>.*)"
)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")


def choice_of(text: str) -> str | None:
    r"""Return the letter of a choice with its value, such as `\text{(C)} 10`; None for others."""
    found = _CHOICE.fullmatch(normalized(text)) if len(text) <= MAX_CHARACTERS else None
    if found is None or _OTHER_CHOICE.search(found["rest"]):
        return None
    rest = read_value(found["rest"].removesuffix("}") if found[2] else found["rest"])
    is_one = not isinstance(rest, (Unreadable, Words)) and (
        not isinstance(rest, Grouped) or rest.kind is not ValueKind.LIST
    )
    return next(filter(None, found.groups())) if is_one else None


def has_variables(body: str) -> bool:
    r"""Return whether normalized `body` has letters besides `e`, `i`, `\pi` and function names."""
    commands = _COMMAND.findall(body)
    if any(name in GREEK for name in commands):
        return True
    plain = re.sub(r"[A-Za-z]+", _without_function, _COMMAND.sub(" ", body))
    return any(letter.isalpha() and letter not in "ei" for letter in plain)


def may_cancel(body: str) -> bool:
    r"""Return whether the variables of normalized `body` may cancel out, as in `\frac{x}{x}`.

    Each must be there twice, in a formula of functions alone: no equation, and no text.
    """
    commands = _COMMAND.findall(body)
    if _NO_TERM.search(body) or not set(commands) <= _CANCELING:
        return False
    plain = re.sub(r"[A-Za-z]+", _without_function, _COMMAND.sub(" ", body))
    names = [letter for letter in plain if letter.isalpha() and letter not in "ei"]
    names += [name for name in commands if name in GREEK]
    return all(count > 1 for count in Counter(names).values())


def _without_function(found: "re.Match[str]") -> str:
    return "" if found[0] in FUNCTIONS else found[0]


def value_of_equation(text: str, *, of_sums: bool = False) -> str:
    """Return the value that normalized `text` gives a name or a calculation; else all of it.

    `of_sums` also takes the right side of `m + n = 7`, as a solution ends, though as an answer it
    is an equation.
    """
    text, rough = (*_parts(text, _ROUGHLY), "")[:2]
    if rough and _NAME.fullmatch(text):
        return rough
    parts = _parts(text, _EQUALS)
    if len(parts) < 2 or not all(parts) or len(split_list(text)) > 1:
        return text
    left = parts[0]
    is_name = all(_NAME.fullmatch(one) for one in _names(left))
    is_sum = of_sums and re.fullmatch(rf"(?:{_LETTER}(?:_\{{?\w\}}?)?[ +*-]*|\\cdot *)+", left)
    if len(parts) > 2 or is_name or is_sum:
        return parts[-1]
    return text if has_variables(left) or has_variables(parts[-1]) else parts[-1]


def of_equation(text: str) -> str:
    r"""Return the last side of an equation as it is written, up to `\approx`."""
    exact, rough = (*_parts(text, _ROUGHLY), "")[:2]
    sides = _parts(exact, _EQUALS)
    return sides[-1] if len(sides) > 1 or not rough or not _NAME.fullmatch(exact) else rough


def _names(left: str) -> tuple[str, ...]:
    """Return the left side of an equation as names: one, or the members of a tuple `(x, y)`."""
    is_tuple = left.startswith("(") and left.endswith(")") and closing(left, 0) == len(left) - 1
    names = split_list(left[1:-1], groups=False) if is_tuple else (left,)
    return names or (left,)


def _read(text: str) -> Value:
    text = text.strip()
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    amount = read_amount(text)
    if amount is not None:
        return amount
    based = _BASED_DIGITS.fullmatch(text)
    if based and all(int(digit, 16) < int(based[2]) for digit in based[1]):
        return Words(text=f"{based[1].upper()}_{{{based[2]}}}")
    if not text or "\\ldots" in text or _LOWERED_NUMBER.search(text):
        return Unreadable(text=text)
    matrix = _MATRIX.fullmatch(text)
    if matrix and text.count("\\begin") == 1:
        rows = [row for row in re.split(r"\\\\|\\cr(?![A-Za-z])", matrix[2]) if row.strip()]
        members = tuple(_group(ValueKind.ROW, row.split("&"), row) for row in rows)
        return Grouped(kind=ValueKind.MATRIX, members=members, text=text)
    if "\\begin" in text:
        return Formula(body=text, unit=None, text=text)
    parts = split_list(text)
    if len(parts) > 1:
        return _group(ValueKind.LIST, parts, text)
    if text.count("\\pm") == 1 and "\\mp" not in text:
        before, _, after = text.partition("\\pm")
        plus = "" if not before.strip() or before.rstrip()[-1] in "{(=" else "+"
        return _group(ValueKind.LIST, (f"{before}{plus}{after}", f"{before}-{after}"), text)
    unions = _parts(text, re.compile(r"\\cup(?![A-Za-z])"))
    if len(unions) > 1:
        return _group(ValueKind.UNION, unions, text)
    named = _named(text)
    return named or _inside_brackets(text) or _leaf(text)


def _named(text: str) -> Value | None:
    """Read an equation, a membership or an inequality about one name; None if it is none."""
    value = value_of_equation(text)
    if value != text:
        left = _parts(_parts(text, _ROUGHLY)[0], _EQUALS)[0]
        inner = _read(value)
        if _NAME.fullmatch(left) is None:
            return _with_names(inner, _names(left))
        return Named(name=left.replace(" ", ""), value=inner, text=text)
    member = _parts(text, re.compile(r"\\in(?![A-Za-z])"))
    if len(member) == 2 and _NAME.fullmatch(member[0]):
        return Named(name=member[0].replace(" ", ""), value=_read(member[1]), text=text)
    signs = [found[0].strip() for found in _RELATION.finditer(text)]
    sides = _parts(text, _RELATION)
    if len(sides) != len(signs) + 1 or not 1 <= len(signs) <= 2:
        return None
    if len(signs) == 2:
        low, name, high = sides
        if {sign in ("<", "\\le") for sign in signs} == {False}:
            low, high, signs = high, low, signs[::-1]
        elif {sign in ("<", "\\le") for sign in signs} != {True}:
            return None
    else:
        is_below = signs[0] in ("<", "\\le")
        if _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
            sides, is_below = sides[::-1], not is_below
        name, bound = sides
        low, high = ("-\\infty", bound) if is_below else (bound, "\\infty")
        signs = ["<", signs[0]] if is_below else [signs[0], "<"]
    if not _NAME.fullmatch(name) or has_variables(low) or has_variables(high):
        return None
    opens, closes = ("(" if signs[0] in "<>" else "["), (")" if signs[1] in "<>" else "]")
    interval = _group(ValueKind(f"{opens}{closes}"), (low, high), text)
    return Named(name=name.replace(" ", ""), value=interval, text=text)


def _within(conditions: Sequence[str]) -> Named | None:
    """Return the interval of `x > 0` and `x < 1`, one bound each; None for other conditions."""
    ranges: dict[bool, tuple[str, Value, str]] = {}
    for one in conditions:
        named = _named(one) if len(split_list(one)) == 1 and _RELATION.search(one) else None
        if not isinstance(named, Named) or not isinstance(named.value, Grouped):
            return None
        if named.value.kind not in _INTERVALS or len(named.value.members) != 2:
            return None
        low, high = named.value.members
        is_upper = low.text == "-\\infty"
        if is_upper == (high.text == "\\infty"):
            return None
        bound, bracket = (high, named.value.kind[1]) if is_upper else (low, named.value.kind[0])
        ranges[is_upper] = (named.name, bound, bracket)
    if len(ranges) != 2 or ranges[False][0] != ranges[True][0]:
        return None
    (name, low, opens), (_, high, closes) = ranges[False], ranges[True]
    text = ", ".join(conditions)
    interval = Grouped(kind=ValueKind(opens + closes), members=(low, high), text=text)
    return Named(name=name, value=interval, text=text)


def _with_names(value: Value, names: Sequence[str]) -> Value:
    """Return `(1, 2)` with the names of its members, which `(x, y)` gives them."""
    if not isinstance(value, Grouped) or len(value.members) != len(names) or len(names) < 2:
        return value
    members = tuple(
        Named(name=name.replace(" ", ""), value=member, text=member.text)
        for name, member in zip(names, value.members, strict=True)
    )
    return Grouped(kind=value.kind, members=members, text=value.text)


def _inside_brackets(text: str) -> Value | None:
    r"""Read `(...)`, `[...)`, `\{...\}` and `]...[` around all of `text`; None if it has none."""
    if text.startswith("\\{") and text.endswith("\\}") and closing(text, 1) == len(text) - 1:
        inside = text[2:-2].strip()
        if re.search(r"\\mid(?![A-Za-z])|\||:", inside):
            return _built_set(inside)
        return _group(ValueKind.SET, split_list(inside, groups=False) if inside else (), text)
    if text == "\\emptyset":
        return Grouped(kind=ValueKind.SET, members=(), text=text)
    if text == "\\mathbb{R}":
        return _group(ValueKind.OPEN, ("-\\infty", "\\infty"), text)
    reversed_ends = text.startswith("]") or (text.endswith("[") and text.startswith("["))
    if reversed_ends and text.endswith(("[", "]")) and len(text) > 2:
        opens = "(" if text[0] == "]" else "["
        text = f"{opens}{text[1:-1]}{')' if text[-1] == '[' else ']'}"
    if not (text.startswith(("(", "[")) and text.endswith((")", "]"))):
        return None
    if closing(text, 0) != len(text) - 1:
        return None
    parts = split_list(text[1:-1], groups=False)
    if len(parts) == 1:
        return _read(parts[0])
    return _group(ValueKind(f"{text[0]}{text[-1]}"), parts, text)


def _built_set(inside: str) -> Value | None:
    r"""Return the interval or set of `x : x > 3`, the inside of braces; None for others.

    The condition has to be one inequality or membership of a real number.
    """
    built = _BUILT.fullmatch(inside)
    if built is None or len(split_list(built["condition"])) > 1:
        return None
    condition = _named(built["condition"].strip())
    if not isinstance(condition, Named) or condition.name != built["name"].strip():
        return None
    return condition.value if isinstance(condition.value, Grouped) else None


def _leaf(text: str) -> Value:
    words = re.sub(r"\\text *\{([^{}]*)\}", r" \1 ", text)
    bare = re.sub(r"^\(([A-Z])\)$", r"\1", words.strip())
    is_text = text.startswith("\\text") and "\\" not in words
    is_word = _WORDS.fullmatch(bare) is not None
    if is_word and (is_text or len(bare.replace(" ", "")) >= 4 or bare.lower() in _SHORT_WORDS):
        few = len(bare.split()) <= 4
        return Words(text=" ".join(bare.split())) if few else Unreadable(text=text)
    counted = _COUNTED.fullmatch(words.strip()) if is_text else None
    amount = read_amount(f"{counted[1]}\\text{{{counted[2]}}}") if counted else None
    if amount is not None:
        return amount
    if is_text and not is_word and _COMMAND.search(words) is None:
        inner = words.strip()
        return _read(inner) if inner != text and not _PROSE.search(inner) else Unreadable(text=text)
    body, unit = split_unit(text)
    without_text = re.sub(r"\\(?:text|operatorname) *\{[^{}]*\}", "", body)
    if _PROSE.search(_COMMAND.sub(" ", without_text)):
        return Unreadable(text=text)
    return Formula(body=body, unit=unit, text=text)


def split_list(text: str, *, groups: bool = True) -> tuple[str, ...]:
    """Return the parts of `text` between commas and semicolons that stand in no brackets.

    With `groups`, the commas of `1,234` belong to the number, and that of `1000,234` does not.
    """
    grouped = [found.span() for found in GROUPED.finditer(text)] if groups else []
    parts = _parts(text, re.compile("[,;]"), kept=grouped)
    return tuple(part for part in parts if part)


def _parts(
    text: str, separator: "re.Pattern[str]", *, kept: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """Return what stands between separators outside of brackets and of the spans `kept`."""
    parts: list[str] = []
    start = 0
    for found in separator.finditer(text):
        if found.start() < start or any(at < found.start() < end for at, end in kept):
            continue
        depth = sum(step for place, step in bracketed(text) if place < found.start())
        if depth == 0:
            parts.append(text[start : found.start()].strip())
            start = found.end()
    return [*parts, text[start:].strip()]


def distinct(members: Sequence[Value]) -> list[Value]:
    """Return `members` without repeated ones, in their order."""
    return [one for at, one in enumerate(members) if one not in members[:at]]


def _group(kind: ValueKind, parts: Sequence[str], text: str) -> Grouped:
    members: list[Value] = []
    for member in map(_read, parts):
        if (
            kind in (ValueKind.LIST, ValueKind.SET)
            and isinstance(member, Grouped)
            and member.kind is ValueKind.LIST
        ):
            members += member.members
        else:
            members.append(member)
    if kind in (ValueKind.SET, ValueKind.UNION):
        members = distinct(members)
    return Grouped(kind=kind, members=tuple(members), text=text)
