"""Special tokens at the borders of a turn: decoding up to them and encoding after them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Message

_FEW = 16


class End(NamedTuple):
    """An end-of-turn token in a text."""

    token_id: int
    start: int
    """Index of its first character."""
    stop: int
    """Index after its last character."""


def decoded(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of `token_ids` from `tokenizer`, with every space kept."""
    # A tokenizer looks at each element of a list, in Python, before it decodes. Of an array it
    # does not, which is twice as fast for an answer, and costs as much as it saves for few ids.
    ids = list(token_ids) if len(token_ids) < _FEW else np.array(token_ids, np.int32)
    # A clean-up would remove spaces before punctuation that the model did write.
    return tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


class SpecialTokens:
    """The special tokens of one tokenizer, and their effect on adjacent text."""

    def __init__(
        self, tokenizer: Any, *, stop_token_ids: Sequence[int], marks: Collection[str]
    ) -> None:
        """`marks`: special tokens that are kept when a reply is decoded."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        texts = {token_id: self._text([token_id]) for token_id in stop_token_ids}
        self._ends = {
            token_id: text
            for token_id, text in texts.items()
            if tokenizer.encode(text, add_special_tokens=False) == [token_id]
        }
        self.anchor = self._find_anchor()
        """A special token that leaves adjacent white space unchanged; None = there is none."""
        self._dropped = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in marks
        )
        if texts and not self._ends:
            raise ConfigError(
                f"the model's tokenizer encodes none of the end-of-turn tokens {texts} as one "
                "token; correct eos_token_id in generation_config.json, or the tokenizer"
            )

    def decode_reply(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion, without its special tokens except the marks."""
        return self._text([token for token in token_ids if token not in self._dropped])

    def unknown_in(self, token_ids: Sequence[int]) -> list[str]:
        """Return the special tokens that are neither marks nor end-of-turn tokens."""
        return [
            self._text([token])
            for token in token_ids
            if token in self._dropped and token not in self._ends
        ]

    def decode_exactly(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` from the middle of a text, with special tokens.

        A decoder may drop the space at the beginning of a text, so the ids are decoded behind a
        special token.
        """
        if self.anchor is None:
            return self._text(token_ids)
        return self._text([self.anchor, *token_ids])[len(self._text_of(self.anchor)) :]

    def encode_after(self, end_id: int | None, text: str) -> list[int]:
        """Return the ids of `text` after the end-of-turn token `end_id`; None = after any token.

        A tokenizer may put a space in front of a text, and a special token may absorb the white
        space that follows it. Encoding behind the token gives the same ids as in the whole text.
        """
        return self.encode_each([(self.anchor if end_id is None else end_id, text)])[0]

    def encode_each(self, pieces: Sequence[tuple[int | None, str]]) -> list[list[int]]:
        """Return the ids of each (token before it, text); None = at the beginning of a text."""
        before = [self._text_of(one) if one is not None else "" for one, _ in pieces]
        texts = [start + text for start, (_, text) in zip(before, pieces, strict=True)]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        for ids, (token_id, _) in zip(encoded, pieces, strict=True):
            assert token_id is None or ids[0] == token_id, f"{token_id} merges with what follows"
        return [
            ids if token_id is None else ids[1:]
            for ids, (token_id, _) in zip(encoded, pieces, strict=True)
        ]

    def first_end(self, text: str) -> End | None:
        """Return the first end-of-turn token in `text`."""
        found = [
            End(token_id, start, start + len(end))
            for token_id, end in self._ends.items()
            if (start := text.find(end)) >= 0
        ]
        return min(found, key=lambda end: end.start, default=None)

    def first_special(self, text: str) -> tuple[int, str] | None:
        """Return the id and text of the first special token in `text`; None = there is none."""
        places = {
            token_id: place
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special and (place := text.find(token.content)) >= 0
        }
        if not places:
            return None
        # If two begin at the same place, the tokenizer finds the longer one.
        kinds = self._tokenizer.added_tokens_decoder
        first = min(places, key=lambda one: (places[one], -len(kinds[one].content)))
        return first, kinds[first].content

    @property
    def end_ids(self) -> Collection[int]:
        """The ids of the tokens that end a turn."""
        return self._ends.keys()

    @property
    def ends_text(self) -> str:
        """The end-of-turn tokens, for people."""
        return ", ".join(f"{text!r}, token {token_id}" for token_id, text in self._ends.items())

    def _find_anchor(self) -> int | None:
        """Return a special token that leaves adjacent white space unchanged."""
        plain = [
            token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special and not token.lstrip and not token.rstrip
        ]
        return next(
            (token_id for token_id in self._ends if token_id in plain), next(iter(plain), None)
        )

    def _text(self, token_ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, token_ids, skip_special_tokens=False)

    def _text_of(self, token_id: int) -> str:
        """Return the text of one token, cached because every turn needs it."""
        if token_id not in self._texts:
            self._texts[token_id] = self._text([token_id])
        return self._texts[token_id]


_USER = Message(role="user", content="What is new in Tamworth?")
_ANSWER = Message(role="assistant", content="Nothing new there.")
_AGAIN = Message(role="user", content="And in Oxley?")
_SHOWN = 40


class TurnEnd(NamedTuple):
    """Text and tokens that a template writes after an answer."""

    is_known: bool
    """Whether one of the tokens ends a completion."""
    token: str
    """The first special token; empty = there is none."""
    token_id: int | None
    text: str
    """The text up to the next message."""


def turn_end(text: Callable[[Sequence[Message], bool], str], special: SpecialTokens) -> TurnEnd:
    """Return how the template ends answers.

    `text` renders messages, with a generation prompt or without.
    """
    # A template may write the end token behind the last turn alone, or behind earlier ones.
    last = text([_USER, _ANSWER], False).partition(_ANSWER.content)[2]
    earlier = text([_USER, _ANSWER, _AGAIN], True).partition(_ANSWER.content)[2]
    earlier = earlier.partition(_AGAIN.content)[0]
    if special.first_end(last) is not None:
        return TurnEnd(True, "", None, last)
    for behind in (last, earlier):
        if (found := special.first_special(behind)) is not None:
            return TurnEnd(found[0] in special.end_ids, found[1], found[0], behind)
    if special.first_end(earlier) is not None:
        return TurnEnd(True, "", None, earlier)
    return TurnEnd(False, "", None, last or earlier)


def wrong_end(found: TurnEnd, special: SpecialTokens) -> str | None:
    """Return a remedy if answers end with a token that does not end the model's; else None."""
    if found.is_known or found.token_id is None:
        return None
    known = special.ends_text
    return (
        f"the chat template ends an answer with {found.token!r} (token {found.token_id}), which is "
        f"no end token of the model ({known}), so no answer would end before max_tokens; add "
        f"{found.token_id} to eos_token_id in generation_config.json in the model's folder (in a "
        "copy of it, if it is on the Hub), or set chat_template to a template that ends answers "
        "with an end token of the model"
    )


def no_end(found: TurnEnd, special: SpecialTokens) -> str | None:
    """Return a remark if no token ends answers; else None."""
    if found.is_known or found.token_id is not None:
        return None
    return (
        f"the chat template writes no end token behind an answer, but {found.text[:_SHOWN]!r}: a "
        "model that learns such answers does not learn to stop, and writes on until max_tokens "
        "or a text of stop; set chat_template to a template that ends answers with an end token "
        f"of the model ({special.ends_text})"
    )
