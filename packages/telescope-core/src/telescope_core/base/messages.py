"""Convert messages to and from the JSON of the OpenAI chat API; read JSON. Pure functions."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from telescope_core.base.images import (
    image_in,
    images_from_json,
    message_of,
    parts_of,
    why_no_image,
)
from telescope_core.base.types import Image, JsonValue, Message, Role, ToolCall

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the thinking text of a message, in servers and datasets."""


def message_to_json(message: Message) -> dict[str, Any]:
    """Return `message` in the form of the chat API, in which pictures are parts of the content."""
    fields = message_to_record(message)
    if fields.pop("images", None):
        fields["content"] = parts_of(message)
    return fields


def message_to_record(message: Message) -> dict[str, Any]:
    """Return `message` as files hold it: as in the chat API, but its content is always text."""
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
    if message.images:
        images = map(asdict, message.images)
        fields["images"] = [
            {k: v for k, v in one.items() if (k, v) != ("detail", "")} for one in images
        ]
    return fields


def message_from_json(fields: Mapping[str, Any]) -> Message:
    """Return the message in `fields`; missing text becomes the empty string.

    Servers and datasets name the thinking text `reasoning_content`, `reasoning` or `thinking`; the
    first of these that has text counts. The content may be a list of parts, and arguments of calls
    may be objects. Raises ValueError for parts other than texts and pictures that are given as
    data.
    """
    content, images = _content(fields)
    calls = cast(list[dict[str, Any]], fields.get("tool_calls") or [])
    return Message(
        role=fields.get("role", "assistant"),
        content=content,
        reasoning=next(filter(None, map(fields.get, REASONING_FIELDS)), ""),
        tool_calls=tuple(
            ToolCall(
                id=str(call.get("id", "")),
                name=str(call["function"]["name"]),
                # Tables and some servers have the object itself.
                arguments=given
                if isinstance(given := call["function"].get("arguments") or "{}", str)
                else json.dumps(given, ensure_ascii=False),
            )
            for call in calls
        ),
        tool_call_id=fields.get("tool_call_id"),
        refusal=fields.get("refusal") or "",
        images=images,
    )


def _content(fields: Mapping[str, Any]) -> tuple[str, tuple[Image, ...]]:
    content: object = fields.get("content") or ""
    if isinstance(content, list):
        role: Role = fields.get("role", "user")
        parts = (_part(part) for part in cast(list[object], content))
        message = message_of(role, *parts)
        return message.content, message.images
    return cast(str, content), images_from_json(fields.get("images") or ())


def _part(part: object) -> str | Image:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            image = image_in(part)
    if image is None:
        raise ValueError(
            f"expected parts of type 'text', or 'image_url' with a data URL, got {part!r:.80}"
            + (f"; {why}" if (why := why_no_image(part)) else "")
        )
    return image


def tool_name(tool: Mapping[str, JsonValue]) -> str:
    """Return the name of a tool in OpenAI's format; its repr where it is of another form."""
    match tool:
        case {"function": {"name": str(name)}}:
            return name
        case _:
            return repr(tool)


def json_object(
    content: str | bytes, *, parse_int: Callable[[str], float] | None = None
) -> dict[str, Any] | None:
    """Return the JSON object in a text or a file; None if it is anything else, or cut short.

    `parse_int`: as for `json.loads`.
    """
    try:
        found: object = json.loads(content, parse_int=parse_int)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def without_halves(content: bytes) -> bytes | None:
    """Return JSON with U+FFFD for each half of a surrogate pair, as of a cut emoji.

    None if it has none, or is no JSON.
    """
    try:
        value = json.loads(str(content, "utf-8", "surrogatepass"))
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    mended = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return None if mended == text else mended.encode()


_DIGITS = 12
"""Hexadecimal digits of a digest that names an agent."""


def agent_of(messages: Sequence[Message]) -> str:
    """Return the name of the agent that sent `messages`, as in `Turn.agent`.

    Agents are distinguished by their system messages, also in programs that do not know Telescope;
    empty = no system message.
    """
    if not messages or messages[0].role != "system":
        return ""
    return hashlib.sha256(messages[0].content.encode()).hexdigest()[:_DIGITS]
