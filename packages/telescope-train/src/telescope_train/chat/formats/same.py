"""Compare two messages by meaning, even if callers or templates spell them differently. Pure."""

import json

from telescope_core.base.types import JsonValue, Message, ToolCall
from telescope_core.parsers.tool_calls import load_json


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
    try:
        value = load_json(call.arguments.strip() or "{}")
    except ValueError:
        return call.name, call.arguments.strip()
    return call.name, json.dumps(_plain(value), sort_keys=True)


def _plain(value: JsonValue) -> JsonValue:
    """Write 1.0 as 1, because some languages do so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
