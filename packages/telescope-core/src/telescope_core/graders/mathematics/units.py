r"""Units of answers: a closed list, and the ways in which answers write them. Pure.

Words outside the list are no units, except those of a `\text{...}` at the end, such as `5\text{ red
apples}`: they are a label, unless one of them is a number word or joins two values.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

Dimensions = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of measurement."""

    dimensions: Dimensions
    """Name of a dimension and its power, sorted by name."""
    factor: Fraction = Fraction(1)
    """Its size in the base unit of its dimension."""


PERCENT = Unit(dimensions=(("percent", 1),))
_TABLE = """
length: m meter metre =1; km kilometer kilometre =1000; dm decimeter =1/10
length: cm centimeter centimetre =1/100
length: mm millimeter millimetre =1/1000; inch inches in =254/10000; ft foot feet =3048/10000;
length: yd yard =9144/10000; mi mile =1609344/1000
mass: g gram =1; kg kilogram kilo =1000; mg milligram =1/1000; ton tonne =1000000
mass: lb pound =45359237/100000
mass: oz ounce =45359237/1600000
time: s sec second =1; min minute =60; h hr hour =3600; day =86400; week =604800
months: month =1; yr year =12; decade =120; century centuries =1200
volume: L liter litre =1; mL ml milliliter millilitre =1/1000; gal gallon =1
money: dollar USD buck =1; cent =1/100
euro: euro EUR =1
sterling: sterling GBP =1
rupee: rupee Rs =1
yuan: yuan RMB =1
yen: yen =1
degree: degree deg =1
radian: radian rad =1
celsius: degC celsius =1
fahrenheit: degF fahrenheit =1
percent: percent percentage pct =1
force: N newton =1
energy: J joule =1; kJ kilojoule =1000; cal calorie =1
power: W watt =1; kW kilowatt =1000
voltage: V volt =1
current: A amp ampere =1
frequency: Hz hertz =1; kHz =1000
pressure: Pa pascal =1; kPa =1000
kelvin: K kelvin =1
amount: mol mole =1
area: acre =1
hectares: hectare =1
units: unit =1
people: person people =1
children: child children kid =1
"""
_COUNTED = """
student book page ticket apple orange coin game point piece item box boxes bag way car egg cookie
marble pencil card stamp ball cup bottle slice bead sticker flower tree seat row hat cake cat dog
step vote question problem side face edge vertex vertices integer number digit solution
"""
"""Things that problems count; each is a unit of its own."""


def _table() -> dict[str, tuple[str, Fraction]]:
    found = {
        word: (word.removesuffix("es") if word == "boxes" else word, Fraction(1))
        for word in _COUNTED.split()
    }
    for line in _TABLE.strip().splitlines():
        dimension, _, entries = line.partition(":")
        for entry in entries.strip("; ").split(";"):
            names, _, factor = entry.partition("=")
            for name in names.split():
                found[name] = (dimension, Fraction(factor.strip()))
    return found


_UNITS = _table()
_SPEEDS = {"mph": "miles per hour", "kmh": "km/h", "kph": "km/h", "kmph": "km/h"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_SILENT = {"of", "the", "an", "a", "us"}
_NO_LABEL_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
thousand million billion trillion hundreds thousands millions billions trillions dozen dozens half
lakh lakhs crore crores
halves third thirds fourth fourths quarter quarters fifth fifths sixth sixths seventh sevenths
eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths pair pairs
score double twice triple and or to plus minus times over mod modulo by less more than least most
not no if when where for is are with without negative positive factorial choose base power root
infinity imaginary real undefined otherwise all pi sin cos tan log exp sqrt squared cubed only
then through between per about approximately sets groups
tens mil mils mill mille mln mio bil tril gross thou grand myriad myriads lac lacs googol couple
couples scores fold percent permille permil permyriad basis ppm ppb ppt bps treble quadruple
quintuple twentieth twentieths
"""
_MULTIPLE = re.compile(
    r"[a-z]*illi(?:on|ard)(?:th)?s?|(?:elev|twelf|[a-z]+teen|[a-z]+tie)(?:en)?ths?"
    r"|(?:two|three|four|five|six|seven|eight|nine|ten|hundred|thousand)fold"
)
"""Further words of numbers: `quadrillion`, `milliards`, `twelfths`, `tenfold`."""
_NO_LABEL = frozenset(_NO_LABEL_WORDS.split())
"""Words that may be part of a value, so that they never name what is counted."""
_TOKEN = re.compile(
    r"\\text\{(?P<text>[^{}]*)\}|(?P<word>[A-Za-z]+)\.?|(?P<power>\^ *(?:\{ *-?\d *\}|-?\d))"
    r"|(?P<over>/)|(?P<dot>\\cdot|\*)|(?P<space> +)"
    r"|(?P<degree>\\degree *(?:(?:\\text\{)?(?P<scale>[CF])\}?(?![A-Za-z]))?)"
)
_START = re.compile(r"\\text\{|(?<=[0-9 })])[A-Za-z]|\\degree")
_OF_ANGLES = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_BASED = re.compile(r"([0-9]+) *_ *\{? *([0-9]{1,2}) *\}?")


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""Return normalized `text` without the unit at its end, and that unit; None without one."""
    if text.endswith("%"):
        return text[:-1].rstrip(), PERCENT
    based = _BASED.fullmatch(text)
    if based and int(max(based[1])) < int(based[2]):
        return based[1], Unit(dimensions=((f"base {based[2]}", 1),))
    for start in _START.finditer(text):
        if start.start() == 0 or text[start.start() - 1] == "\\":
            continue
        if start[0] == "\\degree" and _OF_ANGLES.search(text):
            break
        unit = as_unit(text[start.start() :])
        if unit is not None:
            return text[: start.start()].rstrip(), unit
    return text, None


def as_unit(phrase: str) -> Unit | None:
    r"""Return the unit that all of `phrase` writes, such as `cm^2` or `\text{ miles per hour}`."""
    words: list[tuple[str, bool]] = []
    at = 0
    while at < len(phrase):
        token = _TOKEN.match(phrase, at)
        if token is None:
            return None
        at = token.end()
        if token["text"] is not None:
            spelled = re.sub(
                r"degrees? (celsius|fahrenheit)", r"\1", token["text"], flags=re.IGNORECASE
            )
            words += [(word, True) for word in _TOKEN_IN_TEXT.findall(spelled)]
        elif token["degree"] is not None:
            words.append((f"deg{token['scale'] or ''}", True))
        elif token["space"] is None:
            words.append((token[0].rstrip("."), False))
    return _product(words) or _label(phrase)


_TOKEN_IN_TEXT = re.compile(r"[A-Za-z]+|\^ *-?\d|/|[^ .\-]")


def _product(words: list[tuple[str, bool]]) -> Unit | None:
    """Return the unit of words with powers and divisions; None if a word is not a unit."""
    powers: dict[str, int] = {}
    factor, sign, next_power = Fraction(1), 1, 1
    last: tuple[str, Fraction] | None = None
    for word, is_text in words:
        for one in _SPEEDS.get(word, word).replace("/", " / ").split():
            small = one.lower()
            if one in ("/", "per") or (small in ("a", "an") and last is not None):
                sign, next_power = -1, 1
            elif one in ("\\cdot", "*"):
                sign = 1
            elif one.startswith("^") or small in _POWERS_BEHIND:
                more = _POWERS_BEHIND.get(small) or int(one.strip("^{} ").strip())
                if last is None:
                    return None
                powers[last[0]] += sign * (more - 1)
                factor *= last[1] ** (sign * (more - 1))
            elif small in _POWERS:
                next_power = _POWERS[small]
            elif small not in _SILENT:
                last = _unit_of(one, is_text=is_text)
                if last is None:
                    return None
                powers[last[0]] = powers.get(last[0], 0) + sign * next_power
                factor *= last[1] ** (sign * next_power)
                next_power = 1
    kept = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(dimensions=kept, factor=factor) if kept else None


def _unit_of(word: str, *, is_text: bool) -> tuple[str, Fraction] | None:
    """Return dimension and factor; a single letter counts as a unit only in upright text."""
    if len(word) == 1:
        return _UNITS.get(word) if is_text else None
    small = word.lower()
    for spelling in (word, word.removesuffix("s"), small, small.removesuffix("s")):
        if spelling in _UNITS and (len(spelling) > 1 or is_text):
            return _UNITS[spelling]
    return None


def _label(phrase: str) -> Unit | None:
    r"""Return the words of a `\text{...}` as a unit; None if they may be part of the value."""
    found = re.fullmatch(r"\\text\{([A-Za-z .\-]*)\}", phrase.strip())
    words = re.findall(r"[a-z]+", found[1].lower()) if found else []
    is_label = 0 < len(words) <= 5 and not any(
        word in _NO_LABEL or _MULTIPLE.fullmatch(word) for word in words
    )
    if not is_label or not any(len(word) >= 3 for word in words):
        return None
    name = " ".join(word.removesuffix("s") for word in words if word not in _SILENT)
    return Unit(dimensions=((f"label {name}", 1),))
