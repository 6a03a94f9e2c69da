"""Compare two short answers, ignoring case, accents, articles and punctuation. Pure.

The sign and the decimal point of a number are kept.
"""

import re
import unicodedata

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_OF_NUMBERS = (
    (re.compile(r"(?<![\w)])[-\u2212] ?(?=\d)"), " minus "),
    (re.compile(r"(?<=\d)\.(?=\d)"), " point "),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
)
"""A sign, a decimal point, and thousands separators, each with its replacement."""
_NO_WORD = re.compile(r"[^\w]+")
_LONGEST = 1000


def plain_answer(text: str) -> str:
    """Return `text` in lower case without accents, articles and punctuation."""
    spread = unicodedata.normalize("NFKD", text[:_LONGEST].casefold())
    letters = "".join(one for one in spread if not unicodedata.combining(one))
    for sign, word in _OF_NUMBERS:
        letters = sign.sub(word, letters)
    return " ".join(_ARTICLE.sub(" ", _NO_WORD.sub(" ", letters)).split())


def is_same_answer(said: str, wanted: str) -> bool:
    """Return whether an answer equals `wanted` up to spelling; an empty answer never does."""
    plain = plain_answer(said)
    return len(said) <= _LONGEST and bool(plain) and plain == plain_answer(wanted)
