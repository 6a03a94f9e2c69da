"""Reads the messages of a chat request strictly: a field the model would not see is refused."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from telescope_core.types import Message, Role, ToolCall
from telescope_train.gateway.reply import Refusal, unsupported, wrong

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_FIELDS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {
        *("role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls"),
        *("function_call", "audio", "annotations"),
    },
    "tool": {"role", "content", "tool_call_id", "name"},
}
_EMPTY = (None, "", [], {})


def read_messages(plain: object) -> tuple[Message, ...]:
    """Return the conversation of a request; raises Refusal for anything the model cannot get."""
    if not isinstance(plain, list) or not plain:
        raise wrong("messages", "a list of at least one message", plain)
    return tuple(
        _message(one, f"messages[{number}]") for number, one in enumerate(cast(list[Any], plain))
    )


def _message(plain: object, where: str) -> Message:
    if not isinstance(plain, dict):
        raise wrong(where, "an object with role and content", plain)
    fields = cast(dict[str, Any], plain)
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise wrong(f"{where}.role", "one of " + ", ".join(_ROLES), fields.get("role"))
    for name, value in fields.items():
        if name not in _FIELDS[role] and value not in _EMPTY:
            raise unsupported(
                f"{where}.{name}", f"the model would not see it in a {role} message; leave it out"
            )
    if role == "assistant":
        return _assistant(fields, where)
    call_id = fields.get("tool_call_id")
    if role == "tool" and not isinstance(call_id, str):
        raise wrong(f"{where}.tool_call_id", "the id of the call that is answered", call_id)
    return Message(
        role=role, content=_text(fields.get("content"), f"{where}.content"), tool_call_id=call_id
    )


def _assistant(fields: Mapping[str, Any], where: str) -> Message:
    for name in ("function_call", "audio", "refusal"):
        if fields.get(name) not in _EMPTY:
            raise unsupported(f"{where}.{name}", "the gateway never sends this field; leave it out")
    content = fields.get("content")
    reasoning = fields.get("reasoning_content") or fields.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise wrong(f"{where}.reasoning_content", "text", reasoning)
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", "a list of calls", calls)
    return Message(
        role="assistant",
        content="" if content is None else _text(content, f"{where}.content"),
        reasoning=reasoning,
        tool_calls=tuple(
            _call(one, f"{where}.tool_calls[{number}]")
            for number, one in enumerate(cast(list[Any], calls))
        ),
    )


def _call(plain: object, where: str) -> ToolCall:
    match plain:
        case {
            "id": str(call_id),
            "function": {"name": str(name), "arguments": str(arguments)},
        }:
            return ToolCall(id=call_id, name=name, arguments=arguments)
    raise wrong(where, "a function call with id, name and arguments as JSON text", plain)


def _text(content: object, where: str) -> str:
    """Return text, or the texts of parts with a newline between them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise wrong(where, "text, or a list of text parts", content)
    return "\n".join(
        _part(part, f"{where}[{number}]") for number, part in enumerate(cast(list[Any], content))
    )


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise Refusal(
                f"{where} is of type {kind!r}, but the model in training reads text alone; "
                "send parts of type 'text'",
                param=where,
                code="unsupported_content",
            )
    raise wrong(where, "a part such as {'type': 'text', 'text': '...'}", part)
