"""The choices: their order, which depends on the row alone, and the letter of a reply. Pure."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from telescope_core.parsers import boxed_answer, without_thinking

LETTERS = "ABCD"
_MAX_COMPLETION = 100_000
_OPENS = r"(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*\{|\\[(\[]|[\s*_$(\[{`'\"]){0,12}"
_LISTED = (
    r"(?:(?:[)\]}*_$`(\s]{0,4}(?:[,;/&]|\band/or\b|\b(?:or|and|plus)\b)"
    r"|[)\]}*_$` ]{0,4}[+|\\\u2228\u2227]{1,2})[\s*_$`(\[]{0,4}"
    r"(?-i:[A-D])(?=[).,;/&+|*_$`\n]|\s*\Z| or | and | are | \|| \+)"
    r"|[)*_]{0,3} {1,3}[(*_]{0,3}(?-i:[A-D])[)*_.]{0,3}[^\S\n]*(?:\n|\Z))"
)
"""Another letter behind the first: several answers are none."""
_LETTER = (
    rf"{_OPENS}(?:(?:[Oo]ption|[Cc]hoice|[Ll]etter)\b{_OPENS})?"
    rf"((?-i:[A-D]))(?!\w|['-]\w)(?!{_LISTED})"
)
_LINE = re.compile(
    r"^[\s>*_#`$]{0,9}(?:\\(?:text|textbf|mathbf|boxed)\s*\{)?(?:(?:the|my) )?(?:final |correct )?"
    rf"answer(?: is)?[*_`]{{0,3}}\s{{0,9}}[:\uff1a]{_LETTER}",
    re.MULTILINE | re.IGNORECASE,
)
_SAID = re.compile(
    rf"\banswer(?:\s{{1,9}}is\b(?: therefore| thus| then| hence| simply)?|\s{{0,9}}[:\uff1a])"
    rf"[:\uff1a]?{_LETTER}",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"<answer>([^<]{1,500})</answer>", re.IGNORECASE)
_CHOSEN = re.compile(
    r"(?:^|[.!:])[\s>*_#]{0,9}(?:(?:so|thus|therefore|hence|overall|finally),?\s[*_]{0,3})?(?:"
    rf"(?:the )?(?:correct|right|best) (?:option|choice|letter) is[:\uff1a]?{_LETTER}"
    rf"|(?:option|choice){_LETTER}[)\]*_]{{0,4}} is (?:the )?(?:correct|right)"
    r"(?: one| option| choice| answer)?"
    rf"|I(?: would|'ll| will)? (?:choose|pick|select|go with){_LETTER}"
    r")[)\]}*_$`]{0,6}(?=\Z|[.!])",
    re.IGNORECASE,
)
"""Sentences that end with the choice: `Option B is correct only if ...` is none."""
_NAMED = re.compile(
    rf"^[\s>*_#]{{0,9}}(?:final |correct )?answer\b{_LETTER}\W*$", re.MULTILINE | re.IGNORECASE
)
_BOXED = re.compile(rf"(?:answer\s?[:\uff1a])?{_LETTER}(?P<value>.*)", re.DOTALL | re.IGNORECASE)
_OTHER = re.compile(r"(?<!\w)[A-D]\s?[).:\]]")
_ALONE = re.compile(rf"{_LETTER}[)}}.*_$\s`'\"\]\\]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its choices in the order in which they are shown."""

    id: str
    """A hash of question and choices."""
    text: str
    choices: tuple[str, ...]
    letter: str
    """The letter of the right choice."""


def question_of(text: str, right: str, wrong: Sequence[str]) -> Question:
    """Return the question with its choices shuffled by a hash of its row.

    The order is the same in every process, for every seed and beside any other rows. Over many
    rows the right choice stands at each place equally often.
    """
    choices = [right, *wrong]
    content = json.dumps([text, right, *sorted(wrong)]).encode()
    digest = hashlib.sha256(content).hexdigest()
    Random(digest).shuffle(choices)
    return Question(
        id=digest[:16],
        text=text,
        choices=tuple(choices),
        letter=LETTERS[choices.index(right)],
    )


def letter_in(completion: str) -> str:
    """Return the letter that a reply settles on; empty if there is none.

    Thinking does not count. It is the letter in the last line `Answer: X`, which the prompt asks
    for, else the one in the last box, else the last one after "answer is", else the last line
    of the word answer and a letter, else the last line if it says which option is correct or
    chosen, else the whole reply. `<answer>X</answer>` counts like a box. Several letters are no
    answer.
    """
    tail = without_thinking(completion)[-_MAX_COMPLETION:]
    lines = _LINE.findall(tail)
    if lines:
        return lines[-1]
    tagged = _TAGGED.findall(tail)
    boxed = _in_box(tagged[-1].strip() if tagged else boxed_answer(tail) or "")
    said = [boxed] if boxed else _SAID.findall(tail) or _NAMED.findall(tail)
    if said:
        return said[-1]
    last = tail.strip().rpartition("\n")[2].rstrip(".!*_ ")
    chosen = list(_CHOSEN.finditer(last))
    if chosen and chosen[-1].end() == len(last):
        letters = {letter for found in chosen for letter in found.groups() if letter}
        return letters.pop() if len(letters) == 1 else ""
    alone = _ALONE.fullmatch(tail) if len(tail) < 100 else None
    return alone[1] if alone else ""


def _in_box(text: str) -> str:
    """Return the letter in a box that holds it alone, or before a bracket and its value."""
    found = _BOXED.match(text)
    if not found or _OTHER.search(found["value"]):
        return ""
    is_named = found["value"].lstrip("}*_$ ").startswith((")", "]", ".", ":"))
    return found[1] if is_named or not found["value"].strip("}*_$`'\"\\ \t\n") else ""
