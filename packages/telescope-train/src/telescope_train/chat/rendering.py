"""One model's chat template with its tokenizer: messages become text, and replies are read.

Knows nothing of chains or of remembered prompts; that is `renderer`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Message, ToolCall, Tools
from telescope_train.chat.formats import ParsedReply, ReplyFormat, choose_format
from telescope_train.chat.formats.choose import AUTO
from telescope_train.chat.message_form import REFUSALS, message_form
from telescope_train.chat.special_tokens import SpecialTokens
from telescope_train.chat.template import template_text

_ANYBODY = (Message(role="user", content="hello"),)
_ANSWER = Message(role="assistant", content="Good day")
_CALL = ToolCall(id="PROBE1234", name="choose", arguments='{"one": "first"}')
_CALLED = (
    *_ANYBODY,
    Message(role="assistant", content="", tool_calls=(_CALL,)),
    Message(role="tool", content="chosen", tool_call_id=_CALL.id),
)
_TOOLS: Tools = [{"type": "function", "function": {"name": "choose", "parameters": {}}}]


class _Margins(NamedTuple):
    """White space that the template writes around an answer."""

    opening: str = ""
    """Text of the generation prompt before the answer."""
    leading: str = ""
    trailing: str = ""


class Rendering:
    """Writes conversations exactly as the model's template does, and reads replies."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        arguments: Mapping[str, object] | None = None,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """`arguments`: variables of the template, such as `enable_thinking`."""
        self.tokenizer = tokenizer
        # Some templates write today's date in their header. If it changed between two turns, the
        # later prompt would no longer begin with the tokens of the earlier one.
        self._arguments = {"strftime_now": _clock_stopped_at(datetime.now()), **(arguments or {})}
        self.template = template_text(tokenizer)
        self.form = message_form(self.template, self._render)
        self.format = choose_format(
            self.template, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )
        self.special = SpecialTokens(
            tokenizer, stop_token_ids=stop_token_ids, marks=self.format.marks
        )
        self._shows_tools: bool | None = None

    def text(
        self, messages: Sequence[Message], *, tools: Tools = (), add_generation_prompt: bool
    ) -> str:
        """Return the template's text for `messages`; raises ConfigError if it refuses them."""
        try:
            return self._apply(messages, tools, add_generation_prompt)
        except TemplateSyntaxError as error:
            line = dict(enumerate((error.source or "").splitlines(), 1)).get(error.lineno, "")
            raise ConfigError(
                f"the model's chat template has a syntax error in line {error.lineno}"
                f"{f', {line.strip()!r:.80}' if line else ''}: {error.message}; correct it, or set "
                "chat_template to another template"
            ) from None
        except REFUSALS as error:
            # A policy may write call arguments that are not JSON. They are shown as they are, but
            # some templates go through the keys of the arguments and need an object. If that is
            # not the reason, the first error is the one to report.
            with suppress(*REFUSALS):
                return self._apply(messages, tools, add_generation_prompt, wrap_broken=True)
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(
                f"the model's chat template refuses a conversation of {roles}: {error}; change "
                "what the environment or its program sends, or set chat_template to a template "
                "that accepts it"
            ) from None

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Tools,
        add_generation_prompt: bool,
        *,
        wrap_broken: bool = False,
    ) -> str:
        plain = [self.form.plain(message, wrap_broken=wrap_broken) for message in messages]
        return self._render(plain, tools, add_generation_prompt=add_generation_prompt)

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._arguments,
        )

    def shows_tools(self, tools: Tools) -> bool:
        """Return whether the template writes the given tools into the prompt."""
        # Asked once: it depends on the template and not on which tools there are.
        if self._shows_tools is None:
            shown = self.text(_ANYBODY, tools=tools, add_generation_prompt=True)
            try:
                bare = self.text(_ANYBODY, add_generation_prompt=True)
            except ConfigError:  # a template that is for tools alone
                bare = ""
            self._shows_tools = bare != shown
        return self._shows_tools

    def read(self, text: str, prompt: str, *, tools: Tools = ()) -> ParsedReply:
        """Separate the parts of a reply to the text `prompt`.

        White space that the template writes around an answer is removed from it, because the
        template would write it a second time when the answer is sent back.
        """
        plain, called = self._margins
        margins = plain if prompt.endswith(plain.opening) else called
        return self.format.parse(
            text,
            tools=tools,
            opened=self.format.opens_thinking(prompt),
            margins=(margins.leading, margins.trailing),
        )

    @cached_property
    def _margins(self) -> tuple[_Margins, _Margins]:
        """The white space around an answer to the user, and around one after a tool result."""
        plain = self._margins_behind(_ANYBODY, ())
        return plain, self._margins_behind(_CALLED, _TOOLS)

    def _margins_behind(self, asked: Sequence[Message], tools: Tools) -> _Margins:
        try:
            text = self.text([*asked, _ANSWER, *_ANYBODY], tools=tools, add_generation_prompt=True)
        except ConfigError:
            return _Margins()
        before, found, after = text.partition(_ANSWER.content)
        end = self.special.first_end(after)
        trailing = after[: end.start] if end is not None else ""
        if not found or trailing.strip():
            return _Margins()
        with suppress(ConfigError):
            prompt = self.text(asked, tools=tools, add_generation_prompt=True)
            opening = prompt.rpartition(asked[-1].content)[2]
            marks, bare = prompt.rstrip(), before.rstrip()
            # Some history is another text than the prompt; the last mark of both is the same.
            if bare == marks or bare.endswith(marks.split()[-1]):
                leading = before[len(bare) :].removeprefix(prompt[len(marks) :])
                return _Margins(opening, leading, trailing)
        return _Margins(trailing=trailing)


def _clock_stopped_at(moment: datetime) -> Callable[[str], str]:
    return moment.strftime


def written_turn(
    rendering: Rendering, asked: Sequence[Message], said: Message, *, tools: Tools = ()
) -> str | None:
    """Return the text of the turn `said` in the spelling of the template, without its end token.

    It is rendered as history, and what stands behind the generation prompt is cut out.
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
        prompt = rendering.text(_ANYBODY, tools=_TOOLS, add_generation_prompt=True)
        shown, bare = (
            _behind_prompt(
                prompt,
                rendering.text([*_ANYBODY, said], tools=_TOOLS, add_generation_prompt=False),
                said,
                rendering.format,
            )
            for said in (replace(_CALLED[1], reasoning=thought), _CALLED[1])
        )
    except ConfigError:
        return None
    if shown is None or bare is None or not shown.endswith(bare):
        return None
    before, found, after = shown.removesuffix(bare).partition(thought)
    return (before, after) if found else None
