r"""Read numbers in the notations of answers, exactly and without a parser. Pure."""

import re
from dataclasses import dataclass
from fractions import Fraction

from telescope_core.graders.mathematics.notation import MAX_CHARACTERS, normalized
from telescope_core.graders.mathematics.units import PERCENT, Unit, split_unit

_DIGITS = r"[0-9]{1,40}"
_GROUPED = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,12}|[0-9]{1,3}(?: [0-9]{3}){1,12}|[0-9]{1,3}(?:'[0-9]{3}){1,12}"
    r"|[0-9]{1,3}(?:\.[0-9]{3}){2,12}|[0-9]{1,2}(?:,[0-9]{2}){1,12},[0-9]{3})"
)
_REPEATING = r"\.(?P<first>[0-9]{0,20})\\(?:overline|bar|dot) *\{(?P<again>[0-9]{1,20})\}"
_DECIMAL = rf"(?:{_GROUPED}|{_DIGITS})?(?:\.{_DIGITS})|(?:{_GROUPED}|{_DIGITS})\.?"
_PART = r"-?(?:[0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]? *)(?P<money>\$? *)(?P<sign_2>-?)(?:"
    rf"(?P<whole>{_DIGITS})?{_REPEATING}"
    rf"|(?:(?P<mixed>[0-9]{{1,12}}) *)?\\frac *\{{ *(?P<top>{_PART}) *\}} *"
    rf"\{{ *(?P<bottom>{_PART}) *\}}"
    rf"|(?:(?P<mixed_2>[0-9]{{1,12}}) +)?(?P<top_2>{_PART}|{_GROUPED}) */ *"
    rf"(?P<bottom_2>{_PART}|{_GROUPED})"
    rf"|(?P<decimal>{_DECIMAL})"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})"
    r"| *(?:\\times|\\cdot|\*|[xX]) *10 *\^ *"
    r"(?:\{ *(?P<exponent_2>[-+]?[0-9]{1,3}) *\}|(?P<exponent_3>[0-9]{1,3})))?"
    r")(?: *(?P<scale>hundred|thousand|million|billion|trillion|dozen|lakh|crore)s?)?",
    re.ASCII,
)
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "lakh": 10**5,
    "crore": 10**7,
}
_SCALE_IN_TEXT = re.compile(rf"\\text\{{ *({'|'.join(_SCALES)})s?(?![a-z])([^{{}}]*)\}}")
_SEPARATORS = re.compile(r"[,' ]")
_ORDINAL = re.compile(
    r"([0-9]{1,9})(?:(st|nd|rd|th)|(?: |\^ *)*\{? *\\text *\{ *(st|nd|rd|th) *\} *\}?"
    r"| *\^ *\{ *(st|nd|rd|th) *\})",
    re.ASCII,
)
_WITH_UNIT = re.compile(r"[0-9]{1,9} *(?:\\text\{[^{}]*\}|[A-Za-z]{2,})\.? *", re.ASCII)
_ENDINGS = {"1": "st", "2": "nd", "3": "rd"}
ORDINAL = Unit(dimensions=(("ordinal", 1),))
MONEY = Unit(dimensions=(("money", 1),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A number with its unit."""

    value: Fraction
    """In its unit: 25 for `25%`."""
    unit: Unit | None = None
    is_quotient: bool = False
    """Whether it is written as a fraction, which is a calculation if its value is a whole
    number."""
    text: str = ""
    """The normalized text, which may also be a list: `1,234`."""

    def equals(self, other: "Amount") -> bool:
        """Return whether both have the same value; a unit that one side leaves out is ignored.

        A percentage is a number as well: 25% is 25, where the other side left out the sign, and it
        is 0.25.
        """
        if self.unit is None or other.unit is None:
            unit = self.unit or other.unit
            quotient = self.value * 100 == other.value or self.value == other.value * 100
            if unit == PERCENT and quotient:
                plain, percent = (self, other) if self.unit is None else (other, self)
                return plain.value * 100 == percent.value
            return self.value == other.value
        return (
            self.unit.dimensions == other.unit.dimensions
            and self.value * self.unit.factor == other.value * other.unit.factor
        )


def read_amount(text: str) -> Amount | None:
    """Return the number and unit that all of normalized `text` forms; None if it is no number."""
    if ordinal := _ORDINAL.fullmatch(text):
        digits, is_teen = ordinal[1], f"0{ordinal[1]}"[-2] == "1"
        # With another ending it may be a unit, or variables.
        if (ordinal[2] or ordinal[3] or ordinal[4]) == (
            "th" if is_teen else _ENDINGS.get(digits[-1], "th")
        ):
            return Amount(value=Fraction(int(digits)), unit=ORDINAL, text=text)
    body, unit = split_unit(_SCALE_IN_TEXT.sub(_scale_and_unit, text))
    while re.fullmatch(r"\([^(),]*\)|\{[^{},]*\}", body):
        body = body[1:-1].strip()
    found = _NUMBER.fullmatch(body)
    if found is None:
        return _compound(text)
    if found["money"].strip():
        if unit is not None and unit.dimensions != MONEY.dimensions:
            return None
        unit = MONEY
    value = _value(found)
    if value is None:
        return None
    signs = found["sign"].strip() + found["sign_2"]
    if len(signs) > 1:
        return None
    is_quotient = found["bottom"] is not None or found["bottom_2"] is not None
    value = -value if signs == "-" else value
    return Amount(
        value=value * _SCALES.get(found["scale"] or "", 1),
        unit=unit,
        is_quotient=is_quotient,
        text=text,
    )


def _compound(text: str) -> Amount | None:
    """Return the sum of `5 ft 6 in`: whole numbers of ever smaller units of one dimension."""
    parts = [found[0].strip() for found in _WITH_UNIT.finditer(text)]
    if not 2 <= len(parts) <= 4 or _WITH_UNIT.sub("", text):
        return None
    total = Fraction(0)
    units: list[Unit] = []
    for amount in map(read_amount, parts):
        if amount is None or amount.unit is None:
            return None
        size = amount.value * amount.unit.factor
        is_smaller = not units or size < units[-1].factor
        if not is_smaller or (units and units[-1].dimensions != amount.unit.dimensions):
            return None
        total += size
        units.append(amount.unit)
    return Amount(value=total / units[0].factor, unit=units[0], text=text)


def _scale_and_unit(found: "re.Match[str]") -> str:
    rest = found[2].strip()
    return f" {found[1]}" + (f"\\text{{{rest}}}" if rest else "")


def _value(found: "re.Match[str]") -> Fraction | None:
    """Return the value without its sign; None for a fraction over zero or an odd mixed number."""
    if found["again"] is not None:
        first, again = found["first"], found["again"]
        tail = Fraction(int(again), 10 ** len(first) * (10 ** len(again) - 1))
        return Fraction(f"{found['whole'] or '0'}.{first or '0'}") + tail
    for top, bottom, mixed in (("top", "bottom", "mixed"), ("top_2", "bottom_2", "mixed_2")):
        if found[bottom] is None:
            continue
        upper, lower = _plain(found[top]), _plain(found[bottom])
        if lower == 0:
            return None
        if found[mixed] is None:
            return upper / lower
        is_proper = 0 < upper < lower and upper.denominator == lower.denominator == 1
        return int(found[mixed]) + upper / lower if is_proper else None
    power = found["exponent"] or found["exponent_2"] or found["exponent_3"] or "0"
    return _plain(found["decimal"]) * Fraction(10) ** int(power)


def _plain(text: str) -> Fraction:
    """Return the value of digits with thousands separators and a decimal point."""
    digits = _SEPARATORS.sub("", text)
    if digits.count(".") > 1:
        digits = digits.replace(".", "")
    digits = digits.removesuffix(".")
    return Fraction(f"0{digits}" if digits.startswith(".") else digits.replace("-.", "-0."))


def as_fraction(text: str) -> Fraction | None:
    r"""Return the number in `1,200`, `$5`, `-3`, `2.5e4`, `\frac{3}{4}`, `2\frac{1}{2}`, `7 cm`.

    It is counted in the unit that the text names: 25 for `25\%`. None if the text is no number.
    """
    amount = read_amount(normalized(text)) if len(text) <= MAX_CHARACTERS else None
    return amount.value if amount is not None else None


def answer_key(answer: str) -> str:
    r"""Return one text for answers that are the same number, such as `1/2` and `\frac{1}{2}`.

    A unit is left out, since answers to one question often leave it out. What is no number keeps
    its own text, with one spelling for each sign; empty if there is no answer. For the tag
    `answer`, by which rollouts vote in maj@k.
    """
    number = as_fraction(answer)
    return normalized(answer[:MAX_CHARACTERS]) if number is None else str(number)
