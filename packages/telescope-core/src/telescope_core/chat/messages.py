"""Convert messages to and from the JSON of the OpenAI chat API. Pure functions."""

from collections.abc import Mapping
from typing import Any, cast

from telescope_core.types import Message, ToolCall


def message_to_json(message: Message) -> dict[str, Any]:
    """Return `message` in the form of the chat API."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.refusal:
        fields["refusal"] = message.refusal
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def message_from_json(fields: Mapping[str, Any]) -> Message:
    """Return the message in `fields`; missing text becomes the empty string.

    Servers name the thinking text `reasoning_content` or `reasoning`, and both are accepted.
    """
    calls = cast(list[dict[str, Any]], fields.get("tool_calls") or [])
    return Message(
        role=fields.get("role", "assistant"),
        content=fields.get("content") or "",
        reasoning=fields.get("reasoning_content") or fields.get("reasoning") or "",
        tool_calls=tuple(
            ToolCall(
                id=str(call.get("id", "")),
                name=str(call["function"]["name"]),
                arguments=str(call["function"].get("arguments") or "{}"),
            )
            for call in calls
        ),
        tool_call_id=fields.get("tool_call_id"),
        refusal=fields.get("refusal") or "",
    )
