"""Parsers for the forms in which each family of models writes thinking and tool calls."""

from telescope_train.chat.formats.choose import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ParsedReply,
    ReplyFormat,
    choose_format,
)
from telescope_train.chat.formats.reply import same_message, same_words

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "ParsedReply",
    "ReplyFormat",
    "choose_format",
    "same_message",
    "same_words",
]
