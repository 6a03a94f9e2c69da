"""The harmony format of gpt-oss: several messages, each with a channel and maybe a recipient.

The channel `analysis` is thinking. `final`, and `commentary` without a recipient, are text. A
message to `functions.NAME` is a call. The generation prompt ends with `<|start|>assistant`.
"""

import re
from typing import NamedTuple

from telescope_core.parsers.tool_calls import CallText
from telescope_train.chat.formats.reply import (
    Calls,
    ReasoningParser,
    Thought,
    ToolCallParser,
    ToolSchemas,
)

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAME_OF_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")


class _Part(NamedTuple):
    text: str
    """The message as written, including its end mark."""
    header: str
    body: str

    @property
    def channel(self) -> str:
        match = _NAME_OF_CHANNEL.search(self.header)
        return match[1] if match else ""

    @property
    def recipient(self) -> str:
        match = _RECIPIENT.search(self.header)
        return match[1] if match else ""


def split_harmony(text: str) -> Thought:
    """Separate the messages of the analysis channel from the rest."""
    parts = _parts(text)
    thoughts = [part for part in parts if part.channel == "analysis" and not part.recipient]
    rest = [part.text for part in parts if part not in thoughts]
    return Thought("\n".join(part.body for part in thoughts), "".join(rest))


def read_harmony(text: str, tools: ToolSchemas) -> Calls:
    """Return the text for the user and the calls; without tools, everything is text."""
    said: list[str] = []
    calls: list[CallText] = []
    for part in _parts(text):
        if part.recipient and tools:
            calls.append(CallText(part.recipient.removeprefix("functions."), part.body.strip()))
        elif part.header and not part.recipient:
            said.append(part.body)
        else:
            said.append(part.text)
    return Calls("\n".join(said), tuple(calls))


def _parts(text: str) -> list[_Part]:
    """Split `text` into messages; a piece without a header is plain text."""
    parts: list[_Part] = []
    for piece in re.split(f"(?={re.escape(_START)})", text):
        header, found, body = piece.partition(_MESSAGE)
        if not piece:
            continue
        if not found:
            header, body = "", piece
        for end in _ENDS:
            body = body.partition(end)[0]
        parts.append(_Part(piece, header, body))
    return parts


HARMONY_REASONING = ReasoningParser(name="harmony", split=split_harmony, marks=_MARKS)
HARMONY = ToolCallParser(name="harmony", read=read_harmony, marks=_MARKS, is_envelope=True)
