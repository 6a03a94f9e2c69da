"""Prove that nothing is lost between a model and its chat template, for each use of it.

A short conversation is rendered with the template, read back as a reply, and looked for in the next
prompt. A template is refused only for the use that fails: a run without tools is not refused
because of tools.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Message, ToolCall, Tools
from telescope_train.chat.formats import ParsedReply, same_words
from telescope_train.chat.formats.choose import NO_CALLS
from telescope_train.chat.formats.thinking import NO_REASONING
from telescope_train.chat.rendering import Rendering, written_turn
from telescope_train.chat.special_tokens import turn_end, wrong_end

_SYSTEM = Message(role="system", content="Speak of the harbor of Quillberg.")
_USER = Message(role="user", content="What is new in Tamworth?")
_AGAIN = Message(role="user", content="And in Oxley?")
_ANSWER = Message(role="assistant", content="Nothing new there.")
_THOUGHT = "I recall the bulletin."
_REMARK = "Let me see the forecast."
_CALLS = tuple(
    ToolCall(id=call_id, name="look_up_town", arguments=f'{{"town": "{town}", "days": {days}}}')
    for call_id, town, days in (("PROBE1234", "Marrowdale", 7), ("PROBE5678", "Ashcombe", 9))
)
_RESULTS = tuple(
    Message(role="tool", content=content, tool_call_id=call.id)
    for content, call in zip(("dry and sunny", "cold and windy"), _CALLS, strict=True)
)
PROBE_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "look_up_town",
            "description": "Return the weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["town", "days"],
            },
        },
    }
]
_OTHER = "set chat_template to a template that shows it"
_XML = 'let the environment describe its tools in words (tool_call_format = "xml")'
_XML_OR_OTHER = f"{_XML}, or {_OTHER}"
_SYSTEM_ELSEWHERE = "put its text into what the user says"


class Use(StrEnum):
    """A use of a chat template; each is proved, and refused, separately."""

    ANSWERS = "answers"
    """Every run: the prompt contains the user's text, and answers are read as written."""
    SYSTEM = "system messages"
    """A conversation has a system message."""
    SYSTEM_IN_TURNS = "system messages in later turns"
    """A conversation with a system message continues after an answer."""
    SYSTEM_WITH_TOOLS = "system messages with tools"
    """A conversation with a system message has tools, or calls and their results."""
    TURNS = "several turns"
    """A conversation continues after an answer."""
    THINKING = "thinking"
    """The model writes the marks of thinking."""
    TOOLS = "tools"
    """An environment offers tools."""
    CALLS = "calls in history"
    """A conversation holds a call and its result."""
    PARALLEL_CALLS = "several calls in one turn"
    """A turn with two or more calls is part of a conversation."""
    TEXT_WITH_CALLS = "text beside a call"
    """A turn with both text and a call is part of a conversation."""


def uses_of(messages: Sequence[Message], tools: Tools) -> list[Use]:
    """Return the uses that a prompt for `messages` makes of the template."""
    calling = [message for message in messages if message.tool_calls]
    goes_on = any(message.role == "assistant" and not message.tool_calls for message in messages)
    has_system = any(message.role == "system" for message in messages)
    is_used = {
        Use.ANSWERS: True,
        Use.SYSTEM: has_system,
        Use.SYSTEM_IN_TURNS: has_system and goes_on,
        Use.SYSTEM_WITH_TOOLS: has_system and bool(tools or calling),
        Use.TURNS: goes_on,
        Use.TOOLS: bool(tools),
        Use.CALLS: bool(calling),
        Use.PARALLEL_CALLS: any(len(message.tool_calls) > 1 for message in calling),
        Use.TEXT_WITH_CALLS: any(message.content.strip() for message in calling),
    }
    return [use for use in Use if is_used.get(use)]


def uses_declared(
    *, sends_system: bool = False, offers_tools: bool = False, goes_on: bool = False
) -> list[Use]:
    """Return the uses that an environment declares by its properties."""
    is_used = {
        Use.SYSTEM: sends_system,
        Use.SYSTEM_IN_TURNS: sends_system and goes_on,
        Use.SYSTEM_WITH_TOOLS: sends_system and offers_tools,
        Use.TURNS: goes_on,
        Use.TOOLS: offers_tools,
        Use.CALLS: offers_tools,
    }
    return [use for use in Use if is_used.get(use)]


def refusal(rendering: Rendering, use: Use) -> str | None:
    """Return the reason why the template cannot be used for `use`; None = it can."""
    try:
        return _PROOFS[use](rendering)
    except ConfigError as error:  # the template's own refusal
        return str(error)


def _with_tools_if_needed(
    prove: Callable[[Rendering, Tools], str | None], rendering: Rendering
) -> str | None:
    """Return the result of `prove` without tools; with tools if the template requires them."""
    try:
        return prove(rendering, ())
    except ConfigError as error:
        with suppress(ConfigError):
            return prove(rendering, PROBE_TOOLS)
        raise error from None


def _answer_is_lost(rendering: Rendering, tools: Tools) -> str | None:
    prompt = rendering.text([_USER], tools=tools, add_generation_prompt=True)
    if _USER.content not in prompt:
        return f"the model's chat template leaves out what the user says; {_OTHER}"
    end = turn_end(
        lambda told, opens: rendering.text(told, tools=tools, add_generation_prompt=opens),
        rendering.special,
    )
    if (reason := wrong_end(end, rendering.special)) is not None:
        return reason
    turn = written_turn(rendering, [_USER], _ANSWER, tools=tools)
    if turn is None:
        return (
            f"the generation prompt of the model's chat template ends with {prompt[-40:]!r}, which "
            "the template does not show in front of an answer, so it is not known how an answer is "
            "written; set reasoning_parser if thinking begins there, or set chat_template"
        )
    # What no token ends is told by its report: the policy may end it with one, or with a stop text.
    found = _read(rendering, turn if end.is_known else turn.rstrip(), prompt)
    if found.content != _ANSWER.content or found.calls:
        return (
            f"an answer, which the model's chat template writes as {turn!r}, would be read as "
            f"{found.content!r}; set reasoning_parser or tool_call_parser to a parser that knows "
            "its marks, or set chat_template"
        )
    return None


def _system_is_lost(rendering: Rendering, tools: Tools) -> str | None:
    return _system_is_missing(rendering, [_USER], tools, "")


def _system_is_lost_in_turns(rendering: Rendering, tools: Tools) -> str | None:
    told = [_USER, _ANSWER, _AGAIN]
    return _system_is_missing(rendering, told, tools, " once the conversation goes on")


def _prove_system_with_tools(rendering: Rendering) -> str | None:
    called = [_USER, _calling(1), _RESULTS[0]]
    more = [*called, _ANSWER, _AGAIN]
    later = (more, [*more, replace(_calling(1), tool_calls=_CALLS[1:]), _RESULTS[1]])
    reason = _system_is_missing(rendering, [_USER], PROBE_TOOLS, " where tools are offered")
    reason = reason or _system_is_missing(
        rendering, called, PROBE_TOOLS, " once a call has its result"
    )
    for told in later:
        # A template that refuses to go on behind calls says so itself when that happens.
        with suppress(ConfigError):
            reason = reason or _system_is_missing(rendering, told, PROBE_TOOLS, " behind calls")
    return reason and f"{reason}, or {_SYSTEM_ELSEWHERE}"


def _system_is_missing(
    rendering: Rendering, told: Sequence[Message], tools: Tools, when: str
) -> str | None:
    text = rendering.text([_SYSTEM, *told], tools=tools, add_generation_prompt=True)
    if _SYSTEM.content in text and _USER.content in text:
        return None
    return f"the model's chat template leaves out the system message{when}; {_OTHER}"


def _turn_is_lost(rendering: Rendering, tools: Tools) -> str | None:
    told = (_USER, _ANSWER, _AGAIN)
    text = rendering.text(told, tools=tools, add_generation_prompt=True)
    lost = [one for one in told if one.content not in text]
    if not lost:
        return None
    what = "an earlier answer" if _ANSWER in lost else "what the user says"
    return f"the model's chat template leaves out {what} once the conversation goes on; {_OTHER}"


def _thinking_is_unread(
    rendering: Rendering, tools: Tools, asked: Sequence[Message] = (_USER,)
) -> str | None:
    said = replace(_ANSWER, reasoning=_THOUGHT)
    prompt = rendering.text(asked, tools=tools, add_generation_prompt=True)
    turn = written_turn(rendering, asked, said, tools=tools)
    if turn is None or _THOUGHT not in turn:
        return None  # the template shows no thinking, so nothing can be compared
    found = _read(rendering, turn, prompt)
    if same_words(said, _message(found)):
        return None
    return (
        f"the model thinks, but its thinking, which the chat template writes as {turn!r}, would be "
        f"read as the answer {found.content!r} with the thinking {found.reasoning!r}; set "
        "reasoning_parser to a parser that knows its marks, to 'none' to leave the thinking in the "
        "answer, or set chat_template"
    )


def _prove_tools(rendering: Rendering) -> str | None:
    if rendering.format.tool_calls is NO_CALLS:
        shown = ""
        with suppress(ConfigError):
            turn = written_turn(rendering, [_USER], _calling(1), tools=PROBE_TOOLS)
            if turn is not None and _CALLS[0].name in turn:
                shown = f": its chat template shows one as {turn!r}"
        return (
            f"tools are offered, but it is not known how this model writes tool calls{shown}; set "
            f"tool_call_parser, or {_XML}"
        )
    if not rendering.shows_tools(PROBE_TOOLS):
        return f"tools are offered, but the model's chat template leaves them out; {_XML_OR_OTHER}"
    return (
        _prove_calls(rendering)
        or _call_is_unread(rendering, 1)
        or _second_unread(rendering)
        or _unread_behind_calls(rendering, _calling(1))
    )


def _second_unread(rendering: Rendering) -> str | None:
    """Return why a reader finds only one of two calls, which would silently lose the other."""
    try:
        return None if _call_is_lost(rendering, 2) else _call_is_unread(rendering, 2)
    except ConfigError:
        return None  # the template refuses two calls in one turn


def _prove_calls(rendering: Rendering) -> str | None:
    reason = _call_is_lost(rendering, 1) or _unread_behind_calls(rendering, _ANSWER)
    # A template that refuses to go on behind calls says so itself when that happens.
    with suppress(ConfigError):
        reason = reason or _call_is_lost(rendering, 1, then=(_ANSWER, _AGAIN))
    if reason is None and rendering.format.reasoning is not NO_REASONING:
        with suppress(ConfigError):
            called = (_USER, _calling(1), _RESULTS[0])
            reason = _thinking_is_unread(rendering, PROBE_TOOLS, called)
    return reason


def _text_with_call_is_lost(rendering: Rendering) -> str | None:
    """Return what of a call with a text beside it is not shown again, or not read."""
    if (reason := _call_is_lost(rendering, 1, text=_REMARK)) is not None:
        return reason
    said = _calling(1, text=_REMARK)
    prompt = rendering.text([_USER], tools=PROBE_TOOLS, add_generation_prompt=True)
    turn = written_turn(rendering, [_USER], said, tools=PROBE_TOOLS)
    if turn is None or _REMARK not in turn:
        return None  # the turn is read as that of a call alone
    found = _read(rendering, turn, prompt, tools=PROBE_TOOLS)
    is_read = same_words(_calling(1), replace(_message(found), content="", reasoning=""))
    if is_read and _REMARK in f"{found.reasoning}{found.content}":
        return None
    parser = rendering.format.tool_calls.name
    return (
        f"a text with a call, which the model's chat template writes as {turn!r}, is not read by "
        f"the parser {parser!r}; set tool_call_parser to a parser that reads it, or {_XML}"
    )


def keeps_text_with_calls(rendering: Rendering) -> bool | None:
    """Return whether later prompts show the text beside a call; None = it cannot be tried.

    If they do not, such a turn is a separate training sample, as it was sampled.
    """
    told = [_USER, _calling(1, text=_REMARK), _RESULTS[0]]
    try:
        return _REMARK in rendering.text(told, tools=PROBE_TOOLS, add_generation_prompt=True)
    except ConfigError:
        return None


def _call_is_lost(
    rendering: Rendering, count: int, *, text: str = "", then: Sequence[Message] = ()
) -> str | None:
    """Return what of `count` calls in one turn, or of their results, is not in the next prompt.

    `text` is in the same turn as the calls, and the conversation continues with `then`.
    """
    asked, said = [_USER], _calling(count, text=text)
    before = rendering.text(asked, tools=PROBE_TOOLS, add_generation_prompt=True)
    after = rendering.text(
        [*asked, said, *_RESULTS[:count], *then], tools=PROBE_TOOLS, add_generation_prompt=True
    )
    if not all(one.content in after for one in (_USER, *then)):
        return f"the model's chat template leaves out what is said behind calls; {_OTHER}"
    each = "where a text stands beside a call, " if text else ""
    each = each if count == 1 else f"of {count} calls in one turn, "
    named = after.count(_CALLS[0].name) - before.count(_CALLS[0].name) >= count
    if not named or not all(town in after for town in ("Marrowdale", "Ashcombe")[:count]):
        return f"{each}the model's chat template leaves out calls of earlier turns; {_XML_OR_OTHER}"
    if not all(result.content in after for result in _RESULTS[:count]):
        return f"{each}the model's chat template leaves out results of calls; {_XML_OR_OTHER}"
    return None


def _call_is_unread(rendering: Rendering, count: int) -> str | None:
    said = _calling(count)
    prompt = rendering.text([_USER], tools=PROBE_TOOLS, add_generation_prompt=True)
    turn = written_turn(rendering, [_USER], said, tools=PROBE_TOOLS)
    found = _read(rendering, turn, prompt, tools=PROBE_TOOLS) if turn is not None else None
    if turn is not None and found is not None and same_words(said, _message(found)):
        # An id that the template writes and the reader leaves out would be replaced by another in
        # the result of the call.
        shown = [call.id for call in said.tool_calls if call.id in turn]
        if shown == [call.id for call in found.calls if call.id in shown]:
            return None
    many = "a call is" if count == 1 else f"{count} calls in one turn are"
    parser = rendering.format.tool_calls.name
    written = turn if turn is not None else "something other than its generation prompt goes on"
    return (
        f"tools are offered, but {many} not read by the parser {parser!r} as "
        f"the model's chat template writes it: {written!r}; set tool_call_parser to a parser "
        f"that reads it, or {_XML}"
    )


def _unread_behind_calls(rendering: Rendering, said: Message) -> str | None:
    """Return why `said` is not read in one of the places that follow a call.

    Templates may begin such turns differently: after one result or two, and where the user speaks
    after a result or after the answer to it.
    """
    one, two = ([_USER, _calling(count), *_RESULTS[:count]] for count in (1, 2))
    places = {
        "a result": one,
        "two results": two,
        "a result and what the user says": [*one, _AGAIN],
        "a result, its answer and what the user says": [*one, _ANSWER, _AGAIN],
    }
    what = "a call" if said.tool_calls else "an answer"
    for place, asked in places.items():
        # A template that refuses to go on so says that itself when it happens.
        with suppress(ConfigError):
            prompt = rendering.text(asked, tools=PROBE_TOOLS, add_generation_prompt=True)
            turn = written_turn(rendering, asked, said, tools=PROBE_TOOLS)
            if turn is None:
                return (
                    f"{what} behind {place} does not follow the generation prompt of the model's "
                    f"chat template, which ends with {prompt[-40:]!r}; {_XML_OR_OTHER}"
                )
            found = _read(rendering, turn.rstrip(), prompt, tools=PROBE_TOOLS)
            is_read = same_words(said, replace(_message(found), reasoning=""))
            if not is_read or (found.content != said.content and not said.tool_calls):
                return (
                    f"{what} behind {place}, which the model's chat template writes as {turn!r}, "
                    f"would be read as the answer {found.content!r} with {len(found.calls)} calls; "
                    f"{_XML_OR_OTHER}"
                )
    return None


def _calling(count: int, *, text: str = "") -> Message:
    return Message(role="assistant", content=text, tool_calls=_CALLS[:count])


def _read(rendering: Rendering, turn: str, prompt: str, *, tools: Tools = ()) -> ParsedReply:
    """Parse `turn` in the way of a sampled turn: through token ids."""
    ids = rendering.special.encode_after(None, turn)
    return rendering.read(rendering.special.decode_reply(ids), prompt, tools=tools)


def _message(reply: ParsedReply) -> Message:
    return Message(
        role="assistant",
        content=reply.content,
        reasoning=reply.reasoning,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reply.calls
        ),
    )


_PROOFS: Mapping[Use, Callable[[Rendering], str | None]] = {
    Use.ANSWERS: partial(_with_tools_if_needed, _answer_is_lost),
    Use.SYSTEM: partial(_with_tools_if_needed, _system_is_lost),
    Use.SYSTEM_IN_TURNS: partial(_with_tools_if_needed, _system_is_lost_in_turns),
    Use.SYSTEM_WITH_TOOLS: _prove_system_with_tools,
    Use.TURNS: partial(_with_tools_if_needed, _turn_is_lost),
    Use.THINKING: partial(_with_tools_if_needed, _thinking_is_unread),
    Use.TOOLS: _prove_tools,
    Use.CALLS: _prove_calls,
    Use.PARALLEL_CALLS: partial(_call_is_lost, count=2),
    Use.TEXT_WITH_CALLS: _text_with_call_is_lost,
}


def thinking_mark(rendering: Rendering) -> str:
    """Return the text that begins thinking in the template's form; empty = not known."""
    try:
        turn = written_turn(rendering, [_USER], replace(_ANSWER, reasoning=_THOUGHT))
    except ConfigError:
        return ""
    return turn.partition(_THOUGHT)[0].strip() if turn and _THOUGHT in turn else ""
