"""Find the tool calls of a turn, answer them in the same format, and count them per rollout."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

from telescope_core.base.types import Image, Message, ToolCall
from telescope_core.environments.tool_functions import Tool
from telescope_core.parsers.texts import split_thinking
from telescope_core.parsers.tool_calls import CallText, TaggedBlock, tagged_blocks

ToolCallFormat = Literal["xml", "native"]
_RESULT, _RESULT_END = "<tool_response>\n", "\n</tool_response>"


class ToolFailure(StrEnum):
    """Why a tool call has no result; the policy is told, and each kind is a metric."""

    MALFORMED = "malformed"
    """The text that was written as a call cannot be read as one, or names no tool."""
    UNKNOWN_TOOL = "unknown_tool"
    """No tool has that name."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments do not fit the tool's schema."""
    REFUSED = "refused"
    """The tool raised ToolError, because it cannot do what was asked."""
    RAISED = "raised"
    """The tool raised another exception."""
    TIMED_OUT = "timed_out"
    """The tool did not return within its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The result or failure of one call."""

    name: str
    text: str
    """Text for the policy."""
    images: tuple[Image, ...] = ()
    """Pictures for the policy, each with its place in `text`."""
    failure: ToolFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCalls:
    """The tool calls of one assistant message."""

    calls: tuple[ToolCall, ...]
    is_native: bool
    """Whether they came as `tool_calls` of the message, not as tags in its text."""

    def answers(self, outcomes: Sequence[ToolOutcome]) -> list[Message]:
        """Return tool messages for native calls, or one user message with tags for tagged calls."""
        if self.is_native:
            return [
                Message(
                    role="tool",
                    content=outcome.text,
                    images=outcome.images,
                    tool_call_id=one.id,
                )
                for one, outcome in zip(self.calls, outcomes, strict=True)
            ]
        text, images = "", list[Image]()
        for one in outcomes:
            text += f"\n{_RESULT}" if text else _RESULT
            images += [replace(image, at=len(text) + image.at) for image in one.images]
            text += f"{one.text}{_RESULT_END}"
        return [Message(role="user", content=text, images=tuple(images))]


def turn_calls(message: Message) -> TurnCalls:
    """Return the native calls of `message`, or else the tagged calls in its text after thinking."""
    if message.tool_calls:
        return TurnCalls(calls=message.tool_calls, is_native=True)
    return TurnCalls(calls=tuple(tagged_calls(message.content)), is_native=False)


def tagged_calls(text: str) -> list[ToolCall]:
    """Return the calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    The last tag need not be closed. Tags in thinking do not count. A block without a call becomes a
    call of a tool named "" with the block's text as arguments, so that the policy gets an error for
    it.
    """
    blocks = list(tagged_blocks(text))
    thought = _end_of_thinking(text, blocks)
    if text[thought:].lstrip().startswith("<think>"):  # cut while it was thinking
        return []
    written = [
        call
        for one in blocks
        if one.start >= thought
        for call in one.calls or (CallText("", one.body.strip()),)
    ]
    return [
        ToolCall(id=f"call_{number}", name=call.name, arguments=call.arguments)
        for number, call in enumerate(written)
    ]


def _end_of_thinking(text: str, blocks: Sequence[TaggedBlock]) -> int:
    # A mark inside a string of a call ends no thinking.
    ends = (
        end.end()
        for end in re.finditer("</think>", text)
        if not any(one.calls and one.start < end.start() < one.end for one in blocks)
    )
    return max(ends, default=0)


class TurnAnswer(NamedTuple):
    """What a turn says after its thinking; empty if the thinking is not closed."""

    text: str
    spoken: str
    """The same without tagged calls."""


def answer_in(text: str) -> TurnAnswer:
    """Return the parts of a turn's `text` that others than the policy may see."""
    blocks = list(tagged_blocks(text))
    begin = position = _end_of_thinking(text, blocks)
    spoken = ""
    for one in blocks:
        if one.start >= begin:
            spoken += text[position : one.start]
            position = one.end
    spoken += text[position:]
    if not split_thinking(spoken).is_closed:
        return TurnAnswer("", "")
    return TurnAnswer(text[begin:].strip(), spoken.strip())


def without_results(text: str, before: Message | None) -> str:
    """Return the text of a user message without results of tagged calls in the message `before`."""
    begin, end = text.find(_RESULT), text.rfind(_RESULT_END)
    if not 0 <= begin < end or before is None or before.role != "assistant":
        return text
    if not tagged_calls(before.content):
        return text
    return (text[:begin] + text[end + len(_RESULT_END) :]).strip()


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Return the prompt text that lists a model's tools and how to call them with tags."""
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these tools:\n{schemas}\n\n"
        'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>. '
        "Several calls in one message run at the same time. "
        "Answer without a call when you are done."
    )


class ToolUse:
    """Counts the tool calls of one rollout, as metrics."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._calls: Counter[str] = Counter()
        self._failures: Counter[ToolFailure] = Counter()
        self._num_unrecovered = 0
        self._num_recovered = 0

    def add(self, outcomes: Sequence[ToolOutcome]) -> None:
        """Count the calls of one turn; a successful call recovers the errors of earlier turns."""
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        self._calls.update(outcome.name for outcome in outcomes)
        self._failures.update(failures)
        if len(failures) < len(outcomes):
            self._num_recovered += self._num_unrecovered
            self._num_unrecovered = 0
        self._num_unrecovered += len(failures)

    def metrics(self) -> dict[str, float]:
        """Return calls in total and per tool, errors in total and per kind, recovered errors."""
        return {
            "tool_calls": float(self._calls.total()),
            **{f"tool_calls/{name}": float(self._calls[name]) for name in self._names},
            "tools_used": float(sum(self._calls[name] > 0 for name in self._names)),
            "tool_errors": float(self._failures.total()),
            **{f"tool_errors/{kind}": float(self._failures[kind]) for kind in ToolFailure},
            "tool_errors_recovered": float(self._num_recovered),
        }
