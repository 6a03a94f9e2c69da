"""Messages and completions to and from the JSON of the OpenAI chat API. Pure functions."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from telescope_core.errors import EndpointError
from telescope_core.types import Completion, Message, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]
_FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "stop",
    None: "stop",
}


def message_to_json(message: Message) -> dict[str, Any]:
    """Return `message` as the chat API has it."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
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
    """Return the message in `fields`; absent text becomes the empty string.

    Servers call the thinking `reasoning_content` or `reasoning`; both are read.
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
    )


def completion_from_json(reply: Mapping[str, Any], *, where: str) -> Completion:
    """Return the first choice of a chat reply; `where` names the endpoint in errors."""
    try:
        choice = reply["choices"][0]
        message = message_from_json(choice["message"])
        finish_reason = _FINISH_REASONS[choice.get("finish_reason")]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"{where} answered with something that is not a chat completion "
            f"({type(error).__name__}: {error}); expected choices[0].message"
        ) from None
    usage = cast(Mapping[str, Any], reply.get("usage") or {})
    return Completion(
        message=message,
        finish_reason="tool_calls" if message.tool_calls else finish_reason,
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        num_completion_tokens=int(usage.get("completion_tokens") or 0),
    )
