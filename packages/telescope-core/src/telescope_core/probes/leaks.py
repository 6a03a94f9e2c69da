"""Find answers that can be read off the text which the policy sees. Pure.

A `7` appears in many prompts by chance, and texts for reading comprehension contain their answers;
neither is a leak. An answer leaks if a fixed rule finds it. A *reader* is a rule that takes the
text beside the same two words, or at the same end, of every prompt. It is a leak if it is right for
three quarters of the examples, and for a third more of them than the most frequent answer. An
*announcement*, such as `Answer: 46`, is a leak in a single example, unless other examples' prompts
have the same words. Only whole words count: `7` is not in `17`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_WORD = re.compile(r"[-+]?\d+(?:[.,/]\d+)*|\w+|[^\w\s]")
_ANNOUNCED = re.compile(
    r"(?:answer|solution|result|gold|label|ground[ _-]?truth|target_?answer|key)\s*"
    r"(?:is|are|:|=|->|was)[\s\"'`(\[{<$*]*(?:\\boxed\{)?",
    re.IGNORECASE,
)
_READER_SHARE, _OVER_CHANCE = 0.75, 1 / 3
_FEWEST = 4
"""Least number of examples with an answer; fewer show nothing."""
_START, _END = "<start>", "<end>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One example: the text that the policy sees before its first answer, and the answer."""

    example_id: str
    text: str
    answers: tuple[str, ...]
    """Ways to write the answer; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """A rule that reads off answers, and an example for which it works."""

    text: str
    example_id: str


def find_leaks(shown: Sequence[Shown]) -> list[Leak]:
    """Return the rules by which answers can be read off, simplest first."""
    known = [one for one in shown if any(_words(answer) for answer in one.answers)]
    return [*_announcements(known), *_readers(known)]


def _announcements(shown: Sequence[Shown]) -> list[Leak]:
    found: list[tuple[Shown, str]] = []
    for one in shown:
        for match in _ANNOUNCED.finditer(one.text):
            after = _words(one.text[match.end() : match.end() + 400])
            for answer in one.answers:
                words = _words(answer)
                if words and after[: len(words)] == words:
                    found.append((one, " ".join(f"{match[0]}{answer}".split())))
    # An instruction that shows an example of the form is the same in all prompts.
    everywhere = Counter(
        said
        for said in {said.casefold() for _, said in found}
        for one in shown
        if said in " ".join(one.text.split()).casefold()
    )
    limit = max(1, len(shown) // 4)
    leaks = [
        Leak(text=f"the answer is announced: {said[:120]!r}", example_id=one.example_id)
        for one, said in found
        if everywhere[said.casefold()] <= limit
    ]
    return leaks[:3]


def _readers(shown: Sequence[Shown]) -> list[Leak]:
    if len(shown) < _FEWEST:
        return []
    hits: Counter[tuple[str, ...]] = Counter()
    witness: dict[tuple[str, ...], Shown] = {}
    for one in shown:
        for reader in set(_contexts(one)):
            hits[reader] += 1
            witness.setdefault(reader, one)
    frequent = Counter(one.answers[0].casefold() for one in shown).most_common(1)[0][1]
    needed = max(_READER_SHARE * len(shown), frequent + _OVER_CHANCE * len(shown))
    best = [(count, reader) for reader, count in hits.items() if count >= needed]
    return [
        Leak(
            text=f"the answer is {_described(reader)}, in {count} of {len(shown)} examples",
            example_id=witness[reader].example_id,
        )
        for count, reader in sorted(best, reverse=True)[:2]
    ]


def _contexts(one: Shown) -> Iterator[tuple[str, ...]]:
    """Yield rules that find the answer of `one`: its side, and the two words beside it.

    A rule looks at the first or the last place where its words appear, and at no other.
    """
    words = [_START, _START, *_words(one.text), _END, _END]
    pairs_before = list(pairwise(words))
    for answer in one.answers:
        wanted = _words(answer)
        size = len(wanted)
        if not wanted:
            continue
        for at in range(2, len(words) - size - 1):
            if words[at : at + size] != wanted:
                continue
            before, after = pairs_before[at - 2], (words[at + size], words[at + size + 1])
            if pairs_before.index(before) == at - 2:
                yield ("first after", *before)
            if len(pairs_before) - 1 - pairs_before[::-1].index(before) == at - 2:
                yield ("last after", *before)
            if after == (_END, _END) or pairs_before.index(after) == at + size:
                yield ("first before", *after)


def _described(reader: tuple[str, ...]) -> str:
    side, *words = reader
    if words[-1] == _START:
        return "at the very beginning"
    if words[0] == _END:
        return "at the very end"
    plain = [word for word in words if word not in (_START, _END)]
    return f"{side.partition(' ')[2]} {' '.join(plain)!r}"


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]
