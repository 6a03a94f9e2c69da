"""`Encoder`: the ids of rendered text, piece by piece, so that no piece is encoded twice.

A conversation that was rewritten is rendered anew in every turn, and encoding all of it each time
is most of a driver's computation for a rollout. A tokenizer looks for its special tokens first, and
encodes the text between two of them separately. A text can therefore be cut before each special
token that ends a turn, and each piece encoded together with that token.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

MAX_REMEMBERED = 2**24
"""Most characters of cached pieces; their ids take as much memory again, or less."""


class Encoder:
    """Encodes whole texts that the template wrote, special tokens included."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_remembered = max_remembered
        self._marks = _marks(tokenizer, stop_token_ids)
        # A plain dictionary that drops its oldest entries. It is only read and changed by the event
        # loop, and never across an await, so rollouts at the same time do not see it half changed.
        self._pieces: dict[str, array[int]] = {}
        self._num_characters = 0

    def encode(self, text: str) -> "array[int]":
        """Return the int32 ids of `text`, the same as those of the tokenizer; a copy."""
        pieces, unknown = self._split(text)
        found = self._encoded(unknown)
        ids = array("i")
        for one in pieces:
            ids.extend(found[one] if one in found else self._pieces[one])
        self._remember(found)
        return ids

    async def encode_ahead(self, text: str) -> None:
        """Encode the pieces of a long `text` in a thread, so that `encode` finds them."""
        _, unknown = self._split(text)
        found = await asyncio.to_thread(self._encoded, unknown)
        # The same pieces may have been encoded meanwhile.
        self._remember({one: ids for one, ids in found.items() if one not in self._pieces})

    def _split(self, text: str) -> tuple[list[str], list[str]]:
        """Return the pieces of `text`, and those of them that are not known yet."""
        pieces = [text]
        for mark in self._marks:
            pieces = [part for piece in pieces for part in _cut(piece, mark)]
        return pieces, list(dict.fromkeys(one for one in pieces if one not in self._pieces))

    def _encoded(self, pieces: Sequence[str]) -> dict[str, "array[int]"]:
        if not pieces:
            return {}
        encoded = self._tokenizer(list(pieces), add_special_tokens=False)["input_ids"]
        return {one: array("i", ids) for one, ids in zip(pieces, encoded, strict=True)}

    def _remember(self, found: dict[str, "array[int]"]) -> None:
        self._pieces |= found
        self._num_characters += sum(map(len, found))
        while self._num_characters > self._max_remembered:
            oldest = next(iter(self._pieces))
            self._num_characters -= len(oldest)
            del self._pieces[oldest]


def _cut(text: str, mark: str) -> Iterator[str]:
    """Yield `text` in pieces that each begin with `mark`, except the first; none is empty."""
    first, *rest = text.split(mark)
    if first:
        yield first
    for one in rest:
        yield mark + one


def _marks(tokenizer: Any, stop_token_ids: Sequence[int]) -> list[str]:
    """Return the special tokens before which a text may be cut.

    They are found in the raw text whatever stands beside them, and never take text beside them.
    """
    if not tokenizer.is_fast:
        return []
    added = tokenizer.added_tokens_decoder
    texts = {token.content for token in added.values()}
    plain = [
        token.content
        for token_id in stop_token_ids
        if (token := added.get(token_id)) is not None
        and token.special
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
    ]
    return [one for one in plain if not any(_overlap(one, other) for other in texts - {one})]


def _overlap(mark: str, other: str) -> bool:
    """Return whether both tokens can occur in overlapping places of a text."""
    ends = range(1, min(len(mark), len(other)))
    return (
        mark in other
        or other in mark
        or any(mark.endswith(other[:n]) or other.endswith(mark[:n]) for n in ends)
    )
