"""Separate thinking from the answer in text that marks it as `<think>...</think>`."""

from dataclasses import dataclass

OPEN = "<think>"
CLOSE = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The thinking and the answer of one text."""

    thinking: str
    answer: str
    """The answer; empty if the thinking is not closed."""
    is_closed: bool
    """Whether the thinking has ended; True when there was none."""


def split_thinking(text: str, *, opening: str = OPEN, closing: str = CLOSE) -> Thinking:
    """Split `text` into thinking and answer at the last closing mark.

    The opening mark may be missing, because some chat templates write it into the prompt. If an
    opening mark is never closed, there is no answer and the whole text is thinking.
    """
    before, mark, after = text.rpartition(closing)
    if mark:
        if opening not in after:
            thought = before.replace(opening, "", 1)
            return Thinking(thinking=thought.strip(), answer=after.strip(), is_closed=True)
        thought = text
    elif opening in text:
        thought = text
    else:
        return Thinking(thinking="", answer=text.strip(), is_closed=True)
    return Thinking(thinking=thought.replace(opening, "", 1).strip(), answer="", is_closed=False)


def without_thinking(text: str, *, opening: str = OPEN, closing: str = CLOSE) -> str:
    """Return only the answer; empty when the thinking is not closed."""
    return split_thinking(text, opening=opening, closing=closing).answer
