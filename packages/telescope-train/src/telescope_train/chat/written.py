"""The model's next turn, in the spelling of its own template. Pure.

The template renders the turn as history, and what stands behind the generation prompt is cut out.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Message, ToolCall
from telescope_train.chat.formats import ReplyFormat
from telescope_train.chat.rendering import Rendering, Tools

_ASKED = (Message(role="user", content="Which one?"),)
_CALL = Message(
    role="assistant",
    content="",
    tool_calls=(ToolCall(id="PROBE1234", name="choose", arguments='{"one": "first"}'),),
)
_TOOLS: Tools = [{"type": "function", "function": {"name": "choose", "parameters": {}}}]


def written_turn(
    rendering: Rendering, asked: Sequence[Message], said: Message, *, tools: Tools = ()
) -> str | None:
    """Return the text of the turn `said`, without its end token.

    None if the template shows something else in place of its generation prompt, so that the text
    cannot be cut out. Raises ConfigError if the template refuses the conversation.
    """
    prompt = rendering.text(asked, tools=tools, add_generation_prompt=True)
    whole = rendering.text([*asked, said], tools=tools, add_generation_prompt=False)
    turn = _behind_prompt(prompt, whole, said, rendering.format)
    if turn is None:
        turn = _behind_last_word(prompt, whole, asked[-1].content)
    if turn is None:
        return None
    end = rendering.special.first_end(turn)
    turn = turn[: end.start] if end is not None else turn
    return _with_thinking(rendering, prompt, turn, said.reasoning)


def _behind_prompt(prompt: str, whole: str, said: Message, form: ReplyFormat) -> str | None:
    opening, closing = form.reasoning.opening, form.reasoning.closing
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    start = _without_thinking_marks(prompt, opening, closing)
    if not whole.startswith(start):
        return None
    turn = whole[len(start) :]
    if form.opens_thinking(prompt):
        bare = turn.lstrip()
        return bare.removeprefix(opening) if bare.startswith(opening) else turn
    if turn.lstrip().startswith((opening, closing)) and not said.reasoning:
        return turn.partition(closing)[2].lstrip("\n")
    return turn


def _behind_last_word(prompt: str, whole: str, word: str) -> str | None:
    """Return the text of `whole` after `word` and the generation prompt, ignoring white space.

    For templates that show history differently from the prompt: each turn is then a separate
    sample, but the model still writes it after the same marks.
    """
    opening, rest = (text.rpartition(word)[2] for text in (prompt, whole))
    if not word or word not in prompt or word not in whole:
        return None
    marks = r"\s*".join(re.escape(one) for one in opening if not one.isspace())
    found = re.match(rf"\s*{marks}", rest)
    return found and rest[found.end() :].removeprefix(opening[len(opening.rstrip()) :])


def _without_thinking_marks(prompt: str, opening: str, closing: str) -> str:
    """Return `prompt` without the thinking that it opens, or opens and closes."""
    bare = prompt.rstrip()
    for mark in (closing, opening):
        if mark and bare.endswith(mark):
            prompt = bare.removesuffix(mark)
            bare = prompt.rstrip()
    return prompt


def _with_thinking(rendering: Rendering, prompt: str, turn: str, thought: str) -> str:
    """Return `turn` with the thinking that a model writes and history may leave out."""
    form = rendering.format
    opening, closing = form.reasoning.opening, form.reasoning.closing
    if form.opens_thinking(prompt):
        if closing not in turn:
            return f"{thought}\n{closing}\n\n{turn}"
        return turn if thought in turn else f"{thought}{closing}{turn.partition(closing)[2]}"
    if not thought or thought in turn or form.forbids_thinking(prompt):
        return turn
    # Some templates show thinking in front of calls alone.
    around = _around_thinking(rendering, thought)
    if around is not None:
        return f"{around[0]}{thought}{around[1]}{turn}"
    if not opening:
        return turn
    head, _, rest = turn.partition(closing)
    if rest and not head.strip().removeprefix(opening).strip():  # a block without its thinking
        return f"{opening}\n{thought}\n{closing}{rest}"
    return f"{opening}\n{thought}\n{closing}\n\n{turn}"


def _around_thinking(rendering: Rendering, thought: str) -> tuple[str, str] | None:
    """Return the template's text before and after the thinking that precedes a call."""
    try:
        prompt = rendering.text(_ASKED, tools=_TOOLS, add_generation_prompt=True)
        shown, bare = (
            _behind_prompt(
                prompt,
                rendering.text([*_ASKED, said], tools=_TOOLS, add_generation_prompt=False),
                said,
                rendering.format,
            )
            for said in (replace(_CALL, reasoning=thought), _CALL)
        )
    except ConfigError:
        return None
    if shown is None or bare is None or not shown.endswith(bare):
        return None
    before, found, after = shown.removesuffix(bare).partition(thought)
    return (before, after) if found else None
