"""Thinking apart from the answer, in text that marks it as `<think>...</think>`."""

from dataclasses import dataclass

OPEN = "<think>"
CLOSE = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What was thought, and what was answered then."""

    thinking: str
    answer: str
    """Empty while the thinking is not over."""
    is_closed: bool
    """Whether the thinking ended; True where there was none."""


def split_thinking(text: str, *, opening: str = OPEN, closing: str = CLOSE) -> Thinking:
    """Split `text` at the last closing mark.

    The opening mark may be missing, as it is where the chat template writes it for the policy.
    An opening mark that is never closed makes everything after it thinking.
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
    """Return the answer alone; empty when the thinking never ended."""
    return split_thinking(text, opening=opening, closing=closing).answer
