"""The results of parsing sampled text, and the parsers of one family. Pure.

No text of the model is lost. Text that cannot be read as a call stays in the message. If only the
name of a call can be read, it becomes a call with the arguments as written, which the tool refuses.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from telescope_core.base.types import JsonValue, Message, ToolCall
from telescope_core.parsers.tool_calls import CallText, canonical_arguments

ToolSchemas = Sequence[Mapping[str, JsonValue]]


class Calls(NamedTuple):
    """The text of a reply, and the calls that were in it."""

    content: str
    calls: tuple[CallText, ...] = ()


class Thought(NamedTuple):
    """A reply, separated into its thinking and the rest."""

    reasoning: str
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallParser:
    """Reads the tool calls of one family of models."""

    name: str
    read: Callable[[str, ToolSchemas], Calls]
    marks: tuple[str, ...] = ()
    """Special tokens that must not be dropped when ids are decoded."""
    is_envelope: bool = False
    """Whether the text is wrapped in marks even if no tools are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """Separates the thinking of one family of models."""

    name: str
    split: Callable[[str], Thought]
    marks: tuple[str, ...] = ()
    opening: str = ""
    """End of a generation prompt after which the model begins to think."""
    closing: str = ""
    """End of a generation prompt that prevents the model from thinking."""


class Block(NamedTuple):
    """A place in a reply that holds calls, or nothing that can be read as one."""

    start: int
    end: int
    calls: Sequence[CallText]


def cut_out(text: str, blocks: Iterable[Block], *, around: str = r"(?!)") -> Calls:
    """Return the calls of `blocks` and the text around them; a block without calls stays in it.

    `around`: pattern of tags that are removed from that text, if there are calls.
    """
    pieces: list[str] = []
    calls: list[CallText] = []
    position = 0
    for block in blocks:
        if block.calls:
            pieces.append(text[position : block.start])
            calls += block.calls
            position = block.end
    pieces = [re.sub(around, "", piece) for piece in (*pieces, text[position:])]
    return Calls(joined(pieces), tuple(calls)) if calls else Calls(text)


def joined(pieces: Sequence[str]) -> str:
    """Return the text around calls, without the white space that separated them."""
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


def functions_of(tools: ToolSchemas) -> dict[str, Mapping[str, JsonValue]]:
    """Return the offered functions, by name."""
    found: dict[str, Mapping[str, JsonValue]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            found.setdefault(name, function)
    return found


def same_message(given: Message, sent: Message) -> bool:
    """Return whether `sent` is the message `given`, sent back by a caller.

    Callers strip white space and write the JSON of arguments again. If they leave something out,
    such as the thinking, it is another message, because a template would show it differently.
    """
    return given == sent or (
        given.role == sent.role
        and given.tool_call_id == sent.tool_call_id
        and [call.id for call in given.tool_calls] == [call.id for call in sent.tool_calls]
        and same_words(given, sent)
    )


def same_words(one: Message, other: Message) -> bool:
    """Return whether content, thinking and calls are equal, except for the ids of the calls."""
    return (
        one.content.strip() == other.content.strip()
        and one.reasoning.strip() == other.reasoning.strip()
        and list(map(_said, one.tool_calls)) == list(map(_said, other.tool_calls))
    )


def _said(call: ToolCall) -> tuple[str, str]:
    return call.name, canonical_arguments(call.arguments)
