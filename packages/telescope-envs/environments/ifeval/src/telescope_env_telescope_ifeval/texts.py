"""Parts of a text that instructions count: words, sentences, paragraphs, marks. Pure.

Each takes time linear in the length of the text, whatever a policy writes.
"""

import re

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\w+(?:[-'\u2019.]\w+)*")
# Stops that the published program's splitter looks at: before white space, and before these marks.
_STOP = re.compile(r"[.!?](?=[)\]}>({\[\"'*:;@!?]|$)")
_NO_TOKEN = re.compile(r"[()\[\]{}\"'`*:;&#@,!?]")
_NUMBER = re.compile(r"-?[.,]?[0-9][0-9.,-]*")
_CLOSING = "\"')]}"
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        "a.d a.m adm ariz aug ave bros calif cie co col colo conn corp cos ct d.c dec dr feb "
        "fla fri ft ga gen ill inc jan jr kan ky l.a lt ltd maj messrs mich minn mr mrs ms n.c "
        "n.d n.h n.j n.m n.y nev nov oct ok okla ore p.m pa ph.d prof r.i rep reps s.c sen sept "
        "sr st tenn tues u.k u.n u.s u.s.a u.s.s.r v va vs vt wash wed wis",
    )
)
_OPENERS = frozenset(
    re.findall(
        r"\S+",
        "above although being both but despite even finally he her here him however i i'm if in "
        "instead into it it's many most nothing please since so some still such the them there "
        "these they this though through tomorrow under us very were when which while yes "
        "yesterday yet your",
    )
)
"""Words that, in a capital letter, let a sentence begin after an abbreviation, an initial or dots.

These words and the abbreviations are chosen so that the counts are those of punkt, which knows
neither `she` here nor `etc` there.
"""
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_SINGLE = re.compile(r"\*[^\n*]*\*")
_DOUBLE = re.compile(r"\*\*[^\n*]*\*\*")


def num_words(text: str) -> int:
    """Return the number of runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


def num_capital_words(text: str) -> int:
    """Return the number of words in capital letters alone; a word may have hyphens."""
    return sum(1 for found in _TOKEN.finditer(text) if found[0].isupper())


def num_sentences(text: str) -> int:
    """Return the number of sentences, each of which ends in . ! or ? or with the text.

    A stop ends a sentence whatever letter follows, and so does one before closing quotes,
    parentheses or stars. One after an abbreviation, an initial or other dots does so only before
    a capital letter of a word that often begins sentences.
    """
    words = text.split()
    count, is_open = 0, False
    for word, after in zip(words, [*words[1:], ""], strict=False):
        is_open = True
        stops = [found.end() for found in _STOP.finditer(word)]
        end = stops[-1] if stops else 0
        rest = word[end:]
        if end and (rest or after) and _ends_sentence(word[:end], "" if rest else after):
            count += 1
            is_open = bool(rest.strip(_CLOSING))
    return count + is_open


def _ends_sentence(word: str, after: str) -> bool:
    """Whether the stop at the end of `word` ends a sentence; `after` is the next word."""
    token = _NO_TOKEN.split(word)[-1]
    stem = token.rstrip(".")
    if _NUMBER.fullmatch(stem):
        return not after[:1].islower()
    is_abbreviation = stem.lower().rpartition("-")[2] in _ABBREVIATIONS
    is_initial = len(stem) == 1 and stem.isalpha()
    if is_abbreviation or is_initial or token.endswith(".."):
        return after[:1].isupper() and after.rstrip(".,!?;:").lower() in _OPENERS
    return True


def divided_paragraphs(text: str) -> list[str] | None:
    """Return the paragraphs between lines of `***`; None if one in the middle is empty."""
    parts = _DIVIDER.split(text)
    if not parts[0].strip():
        parts = parts[1:]
    if parts and not parts[-1].strip():
        parts = parts[:-1]
    return parts if all(part.strip() for part in parts) else None


def num_bullets(text: str) -> int:
    """Return the number of lines that begin with `*`, but not `**`, or with `-`.

    A line of one `*` alone is one bullet with the next line, and none at the end of the text.
    """
    lines = [line.lstrip() for line in text.split("\n")]
    num_stars, is_part = 0, False
    for line, is_last in zip(lines, [*[False] * (len(lines) - 1), True], strict=True):
        is_star = line.startswith("*") and not line.startswith("**") and not is_part
        is_star = is_star and not (is_last and line == "*")
        num_stars += is_star
        is_part = is_star and line == "*"
    return num_stars + sum(line.startswith("-") for line in lines)


def num_highlights(text: str) -> int:
    """Return the number of passages in `*single*` and in `**double**` stars, not empty ones."""
    single = sum(1 for found in _SINGLE.finditer(text) if found[0].strip("*").strip())
    double = sum(1 for found in _DOUBLE.finditer(text) if found[0][2:-2].strip())
    return single + double


def num_placeholders(text: str) -> int:
    """Return the number of passages in square brackets that end on their line."""
    count = 0
    for line in text.split("\n"):
        at = line.find("[")
        while at >= 0 and (end := line.find("]", at)) >= 0:
            count += 1
            at = line.find("[", end)
    return count


def has_title(text: str) -> bool:
    """Whether a line holds a title in double angular brackets."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end > start + 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False
