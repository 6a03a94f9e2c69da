"""Thinking between an opening and a closing mark, before the answer."""

import re
from functools import partial

from telescope_train.chat.formats.kimi import K3_MARKS
from telescope_train.chat.formats.reply import ReasoningParser, Thought


def split_marked(text: str, *, opening: str, closing: str) -> Thought:
    """Return the text between the marks and the text that follows.

    The opening mark may be part of the prompt, so a closing mark alone is enough. Without a closing
    mark, the reply was cut during the thinking.
    """
    before, found, after = text.partition(opening)
    if not found and closing in text:
        before, after = "", text
    elif not found or before.strip():
        return Thought("", text)
    reasoning, _, rest = after.partition(closing)
    # Templates write newlines beside the marks; these are not part of the thought.
    return Thought(reasoning.strip("\n"), re.sub(r"\A\n+", "", rest))


def _unmarked(text: str) -> Thought:
    return Thought("", text)


def _marked(
    name: str, opening: str, closing: str, *, marks: tuple[str, ...] = ()
) -> ReasoningParser:
    """Return the parser; `marks`: the special tokens in the two marks, if there are several."""
    return ReasoningParser(
        name=name,
        split=partial(split_marked, opening=opening, closing=closing),
        marks=marks or (opening, closing),
        opening=opening,
        closing=closing,
    )


NO_REASONING = ReasoningParser(name="none", split=_unmarked)
THINK = _marked("think", "<think>", "</think>")
MISTRAL_THINK = _marked("mistral", "[THINK]", "[/THINK]")
COMMAND_THINK = _marked("command_r", "<|START_THINKING|>", "<|END_THINKING|>")
SEED_THINK = _marked("seed_oss", "<seed:think>", "</seed:think>")
MINIMAX_M3_THINK = _marked("minimax_m3", "<mm:think>", "</mm:think>")
GEMMA4_THINK = _marked(
    "gemma4", "<|channel>thought", "<channel|>", marks=("<|channel>", "<channel|>")
)
KIMI_K3_THINK = _marked("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>", marks=K3_MARKS)
APRIEL_THINK = _marked("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
