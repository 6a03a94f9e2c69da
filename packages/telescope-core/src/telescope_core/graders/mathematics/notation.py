r"""Reduce the notations of answers to one: Unicode signs, TeX formatting, spaces. Pure.

Nothing that changes the value is dropped: letters, functions and words stay.
"""

import re
import unicodedata

MAX_CHARACTERS = 500
"""Characters of an answer that are read; no right answer is longer."""
_GREEK = {
    chr(code): unicodedata.name(chr(code)).rpartition(" ")[2].lower()
    for code in (*range(0x3B1, 0x3CA),)
    if "FINAL" not in unicodedata.name(chr(code))
}
_SMALL = {"lambda", *_GREEK.values()} - {"lamda", "pi", "omicron"}
GREEK = frozenset(
    _SMALL
    | {name.capitalize() for name in _SMALL}
    | {f"var{name}" for name in ("epsilon", "theta", "phi", "rho", "kappa", "sigma")}
    | {"Pi", "ell", "hbar"}
)
"""Commands of Greek letters that stand for variables."""
_CURRENCIES = {
    "euros": r"\u20ac|\\(?:euro|texteuro)(?![A-Za-z])",
    "pounds sterling": r"\u00a3|\\(?:pounds|textsterling)(?![A-Za-z])",
    "yen": r"\u00a5|\uffe5|\\(?:yen|textyen)(?![A-Za-z])",
    "rupees": r"\u20b9|Rs\.?|\\(?:text|mathrm)\{ *Rs\.? *\}",
}
_MONEY_FIRST = tuple(
    (
        re.compile(
            rf"(?<![A-Za-z\\])(?:{sign})(?: |\\[ ,])*"
            r"(-?\.?[0-9]+(?:(?:[.,]|\{,\})[0-9]+)*"
            r"(?: *(?:hundred|thousand|million|billion|trillion|lakh|crore)s?(?![a-z]))?)"
        ),
        rf"\1\\text{{{name}}}",
    )
    for name, sign in _CURRENCIES.items()
)
"""Currencies in front of their amount, and the amount with the currency behind it."""
_BASES = {
    **{"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9},
    **{"ten": 10, "twelve": 12, "sixteen": 16},
}
_BASE_IN_WORDS = re.compile(
    rf"(?<=[0-9A-Fa-f)]) *_ *(?:\{{ *)?(?:\\text *)?\{{ *({'|'.join(_BASES)}) *\}}(?: *\}})?"
)
_STOP_IN_TEXT = re.compile(r"(?: *\\text\{[ .,;:]*\})+[.,;: ]*$")
_END_IN_TEXT = re.compile(r"(?<=[a-z])[.,;:] *\}$")
_SIGNS = str.maketrans(
    {
        # Full-width forms of ASCII, among them digits, brackets and the colon.
        **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},
        "\u3001": ", ",
        "\u2236": ":",
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
        **dict.fromkeys(
            "\u00a0\u2002\u2003\u2005\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\n", " "
        ),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\u2062\ufeff", ""),
        **dict.fromkeys("\u00b7\u22c5\u2219", "\\cdot "),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("\u2264\u2a7d", "\\le "),
        **dict.fromkeys("\u2265\u2a7e", "\\ge "),
        **dict.fromkeys("\u00b0\u00ba\u02da", "\\degree "),
        **dict.fromkeys("\u2032\u2019\u02bc", "'"),
        "\u00d7": "\\times ",
        "\u2715": "\\times ",
        "\u2217": "*",
        "\u00f7": "\\div ",
        "\u00b1": "\\pm ",
        "\u2213": "\\mp ",
        "\u2260": "\\ne ",
        "\u221e": "\\infty ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2208": "\\in ",
        "\u2205": "\\emptyset ",
        "\u211d": "\\mathbb{R}",
        "\u221b": "\\sqrt[3]",
        "\u2026": "\\ldots ",
        "\u2216": "\\setminus ",
        "\u20ac": "\\text{euros}",
        "\u00a3": "\\text{pounds sterling}",
        **dict.fromkeys("\u00a5\uffe5", "\\text{yen}"),
        "\u20b9": "\\text{rupees}",
        **{letter: f"\\{name.replace('lamda', 'lambda')} " for letter, name in _GREEK.items()},
    }
)
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f"
_SUBSCRIPTS = "\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089"
_RAISED = re.compile(f"[{_SUPERSCRIPTS}]+")
_LOWERED = re.compile(f"[{_SUBSCRIPTS}]+")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_ROOT = re.compile("\u221a *([0-9.]+|[A-Za-z])?")
GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])", re.ASCII)
"""A number with commas in front of each three digits."""
_LOOKS = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits)(?![A-Za-z])"
    r"|\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf|bfseries|it"
    r"|itshape|sf|tt)(?![A-Za-z])"
    r"|\\(?:text)?color(?:\[[A-Za-z]+\])? *\{[^{}]*\}|\\! *"
)
_LEADS = re.compile(
    r"(?:(?:=(?![<>=])|[\u2248\u2243\u2245\u2234\u2261\u21d2]|\\(?:approx|simeq|cong|doteq|equiv|therefore"
    r"|Rightarrow|implies)(?![A-Za-z])) *)+"
)
"""Signs before an answer that say of no left side that it is equal, or nearly so."""
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:,\\! *|\{,\})[0-9]{3})+(?![0-9])", re.ASCII)
"""A number with commas that TeX draws close to the digits, which no list has."""
_CLOSE_COMMA = re.compile(r",\\! *|\{,\}")
_BARE = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathnormal|boxed|fbox|ensuremath"
    r"|underline|uline) *\{"
)
_UPRIGHT = re.compile(
    r"\\(?:mathrm|textrm|textbf|textit|textnormal|texttt|textsf|textsc|textup|emph|mbox|hbox"
    r"|rm) *\{"
    r"|\{ *\\rm +(?=[A-Za-z])"
)
_SPACES = re.compile(r"(?<!\\)\\[,;:> ]|~|\\(?:q?quad|thinspace|enspace|space)(?![A-Za-z])| +")
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac *([0-9]) *([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac *([0-9]) *\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac *\{[^{}]*\}) *([0-9])"), r"\1{\2}"),
    (re.compile(r"\\sqrt *([0-9])"), r"\\sqrt{\1}"),
    (re.compile(r"\{\.\}"), "."),
    (re.compile(r"\^ *\{? *\\circ *\}?|\\degree(?![A-Za-z])|\\deg(?![A-Za-z])"), r"\\degree "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:leq|leqslant|leqq)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant|geqq)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\lbrack(?![A-Za-z])"), "["),
    (re.compile(r"\\rbrack(?![A-Za-z])"), "]"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\(?:mathbb|Bbb) *\{?R\}?|\\R(?![A-Za-z])"), r"\\mathbb{R}"),
    (
        re.compile(
            r"\\mathbb\{R\} *(?:-|\\(?:backslash|smallsetminus)(?![A-Za-z])|\\\\) *(?=\\\{)"
        ),
        r"\\mathbb{R} \\setminus ",
    ),
    (re.compile(r"\\text\{([eid])\}"), r"\1"),
    (re.compile(r"\\(?:dots|ldots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\."), r"\\ldots "),
    (
        re.compile(
            r",? *(?:\\text\{ *,? *(?:and|or) *\}|(?<![\\A-Za-z{])(?:and|or)(?![A-Za-z])"
            r"|\\lor(?![a-z])) *"
        ),
        ", ",
    ),
)


def normalized(text: str) -> str:
    """Return `text` with one spelling for each sign, without dollars, formatting and full stop."""
    plain = _VULGAR.sub(_as_fraction, text)
    plain = _RAISED.sub(lambda found: f"^{{{_digits(found[0])}}}", plain)
    plain = _LOWERED.sub(lambda found: f"_{{{_digits(found[0])}}}", plain)
    plain = _ROOT.sub(lambda found: f"\\sqrt{{{found[1]}}}" if found[1] else "\\sqrt ", plain)
    for pattern, behind in _MONEY_FIRST:
        plain = pattern.sub(behind, plain)
    plain = plain.translate(_SIGNS)
    plain = _THOUSANDS.sub(lambda found: _CLOSE_COMMA.sub("", found[0]), plain)
    plain = _without_dollars(_LOOKS.sub("", plain))
    plain = _UPRIGHT.sub(r"\\text{", plain)
    while found := _BARE.search(plain):
        plain = plain[: found.start()] + plain[found.end() - 1 :]
    plain = _BASE_IN_WORDS.sub(lambda found: f"_{{{_BASES[found[1]]}}}", plain)
    plain = _STOP_IN_TEXT.sub("", _SPACES.sub(" ", plain).strip())
    for pattern, spelling in _SPELLINGS:
        plain = pattern.sub(spelling, plain)
    plain = _SPACES.sub(" ", plain).strip().rstrip(".,;:\\ \u3002")
    lead = _LEADS.match(plain)
    plain = plain[lead.end() :] if lead else plain
    return _END_IN_TEXT.sub("}", plain) if "\\text{" in plain else plain


def closing(text: str, start: int) -> int:
    """Return the position at which the bracket at `start` closes, of any kind; -1 if nowhere."""
    depth = 0
    for at, part in bracketed(text, start):
        depth += part
        if depth == 0:
            return at
    return -1


def bracketed(text: str, start: int = 0) -> list[tuple[int, int]]:
    r"""Return the position of each bracket from `start` on, with 1 for an opening, else -1.

    `\{` and `\}` are brackets like `{` and `}`; the place is that of the last character.
    """
    return [
        (at, 1 if text[at] in "([{" else -1)
        for at in range(start, len(text))
        if text[at] in "([{}])"
    ]


def _as_fraction(found: "re.Match[str]") -> str:
    top, _, bottom = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _digits(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("\u2212", "-")


def _without_dollars(text: str) -> str:
    r"""Return `text` without dollar signs around formulas; one before a digit stays, as money."""
    plain = text.strip()
    for before, after in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inside = plain.rstrip(".")
        is_around = inside.startswith(before) and inside.endswith(after)
        if is_around and len(inside) > len(before + after) and not inside.endswith("\\$"):
            plain = inside[len(before) : -len(after)].strip()
            break
    plain = plain.replace("\\$", "$")
    return re.sub(r"\$(?! *-?[0-9.])", "", plain)
