"""Thinking between an opening and a closing mark, in front of the answer."""

import re
from functools import partial

from telescope_train.chat.formats.reply import ReasoningParser, Thought


def split_marked(text: str, *, opening: str, closing: str) -> Thought:
    """Return what stands between the marks, and what follows.

    The opening mark may stand in the prompt already, so a closing mark alone will do. Without a
    closing mark the reply was cut while it thought.
    """
    before, found, after = text.partition(opening)
    if not found and closing in text:
        before, after = "", text
    elif not found or before.strip():
        return Thought("", text)
    reasoning, _, rest = after.partition(closing)
    # A newline beside the marks belongs to how templates write them, not to the thought.
    return Thought(reasoning.strip("\n"), re.sub(r"\A\n+", "", rest))


def _unmarked(text: str) -> Thought:
    return Thought("", text)


def _marked(name: str, opening: str, closing: str) -> ReasoningParser:
    return ReasoningParser(
        name=name,
        split=partial(split_marked, opening=opening, closing=closing),
        marks=(opening, closing),
        opening=opening,
        closing=closing,
    )


NO_REASONING = ReasoningParser(name="none", split=_unmarked)
THINK = _marked("think", "<think>", "</think>")
MISTRAL_THINK = _marked("mistral", "[THINK]", "[/THINK]")
COMMAND_THINK = _marked("command_r", "<|START_THINKING|>", "<|END_THINKING|>")
