"""Read the messages of a chat request.

If answers must be exact, a field or content that the model would not see is refused. If the request
is passed on to another endpoint, which checks it, only recorded fields are read.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from telescope_core.base.images import image_in
from telescope_core.base.types import Image, Message, Role, ToolCall
from telescope_core.gateway.refusal import Refusal, is_empty, unknown, unsupported, wrong

MAX_MESSAGES = 10_000
"""Most messages of a request; each is compared with the earlier messages of the rollout."""
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
_LABELS = {"cache_control", "cache_breakpoint"}
"""Fields of any message that tell a provider what to cache, and the model nothing."""
_PART_FIELDS = {"type", "text", "annotations", "cache_control"}
_CALL_FIELDS = {"id", "type", "function", "index"}
_FUNCTION_FIELDS = {"name", "arguments"}


def read_messages(plain: object) -> tuple[Message, ...]:
    """Return the conversation of a request; raises Refusal for content the model cannot get.

    Each call must have one result before the next turn begins, and results are sorted by their
    calls: many templates show results without ids, so that a model assigns them by order.
    """
    messages, calls, results = list[Message](), list[str](), list[Message]()
    waiting = Counter[str]()
    listed = _listed(plain)
    speaker = _only_speaker(listed)
    for one, where in listed:
        message = _message(one, where, speaker)
        if message.tool_call_id is None:
            _require_results(waiting, f"{where} ({message.role})")
            messages += [*_in_order(results, calls), message]
            calls, results = [call.id for call in message.tool_calls], []
            waiting = Counter(calls)
        elif waiting[message.tool_call_id]:
            waiting[message.tool_call_id] -= 1
            results.append(message)
        else:
            raise Refusal(
                f"{where}.tool_call_id: no call {message.tool_call_id!r} waits for a result; "
                f"{_shown(waiting)}. Send one result for each call, behind its message",
                param=f"{where}.tool_call_id",
                code="invalid_value",
            )
    _require_results(waiting, "the answer")
    return (*messages, *_in_order(results, calls))


def _in_order(results: list[Message], calls: list[str]) -> list[Message]:
    places = {call_id: place for place, call_id in enumerate(calls)}
    return sorted(results, key=lambda one: places[str(one.tool_call_id)])


def _require_results(waiting: Counter[str], before: str) -> None:
    if waiting.total():
        raise Refusal(
            f"messages: results are missing before {before}; {_shown(waiting)}. Send a result "
            "for each, also for one that was not run",
            param="messages",
            code="invalid_value",
        )


def _shown(waiting: Counter[str]) -> str:
    ids = [repr(one) for one in (+waiting)]
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return f"the ids of calls without a result are {', '.join(ids[:5]) or 'none'}{more}"


def read_loosely(plain: object) -> tuple[Message, ...]:
    """Return the parts of a conversation that can be recorded: texts, thinking and calls."""
    return tuple(_recorded(one, where) for one, where in _listed(plain))


def _listed(plain: object) -> list[tuple[object, str]]:
    messages = cast(list[object], plain) if isinstance(plain, list) else []
    if not messages:
        raise wrong("messages", "a list of at least one message", cast(object, plain))
    if len(messages) > MAX_MESSAGES:
        raise Refusal(
            f"messages must be at most {MAX_MESSAGES:,}, got {len(messages):,}",
            param="messages",
            code="request_too_large",
            status=413,
        )
    return [(one, f"messages[{number}]") for number, one in enumerate(messages)]


def _only_speaker(listed: list[tuple[object, str]]) -> object:
    """Return the name that all messages of the assistant have; None if they tell any apart."""
    fields = [cast(dict[str, Any], one) for one, _ in listed if isinstance(one, dict)]
    names = [one.get("name") for one in fields if one.get("role") == "assistant"]
    return names[0] if names and all(name == names[0] for name in names) else None


def _message(plain: object, where: str, speaker: object) -> Message:
    fields, role = _fields_and_role(plain, where)
    call_id = fields.get("tool_call_id")
    if role == "tool" and not isinstance(call_id, str):
        raise wrong(f"{where}.tool_call_id", "the id of the call that is answered", call_id)
    for name, value in fields.items():
        if name in _FIELDS[role] or name in _LABELS or _adds_nothing(value, fields):
            continue
        if name != "name":
            raise _unseen(f"{where}.{name}", _FIELDS[role], f"a {role} message")
        if value not in (fields["role"], speaker if role == "assistant" else None):
            raise unsupported(
                f"{where}.name",
                "templates do not show names, so the model would not see it; begin the content "
                "with it, such as 'Ann: ...', and leave it out. In AutoGen: "
                "OpenAIChatCompletionClient(..., include_name_in_message=False), in teams with "
                "add_name_prefixes=True as well",
            )
    if role == "assistant":
        return _assistant(fields, where)
    return Message(
        role=role, content=_text(fields.get("content"), f"{where}.content"), tool_call_id=call_id
    )


def _fields_and_role(plain: object, where: str) -> tuple[dict[str, Any], Role]:
    if not isinstance(plain, dict):
        raise wrong(where, "an object with role and content", plain)
    fields = cast(dict[str, Any], plain)
    role = _ROLES.get(str(fields.get("role")))
    if role is None:
        raise wrong(f"{where}.role", "one of " + ", ".join(_ROLES), fields.get("role"))
    return fields, role


def _adds_nothing(value: object, fields: Mapping[str, Any]) -> bool:
    """Return whether an unknown `value` is empty or repeats `fields` of its message.

    Some clients repeat fields that they do not know in an object of their own.
    """
    if not isinstance(value, dict):
        return is_empty(value)
    inner = cast(dict[str, object], value)
    return all(is_empty(one) or fields.get(name) == one for name, one in inner.items())


def _unseen(where: str, known: set[str], place: str) -> Refusal:
    refusal = unknown("field", where, known)
    return Refusal(
        f"{refusal.message} (the model would not see it in {place})",
        param=where,
        code="unsupported_parameter",
    )


def _assistant(fields: Mapping[str, Any], where: str) -> Message:
    for name in ("function_call", "audio", "refusal"):
        if not is_empty(fields.get(name)):
            raise unsupported(f"{where}.{name}", "the gateway never sends this field; leave it out")
    content = fields.get("content")
    reasoning = fields.get("reasoning_content") or fields.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise wrong(f"{where}.reasoning_content", "text", reasoning)
    calls: object = fields.get("tool_calls") or []
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
            call = cast(dict[str, Any], plain)
            _require_seen(call, _CALL_FIELDS, where)
            _require_seen(call["function"], _FUNCTION_FIELDS, f"{where}.function")
            return ToolCall(id=call_id, name=name, arguments=arguments)
        case _:
            raise wrong(where, "a function call with id, name and arguments as JSON text", plain)


def _require_seen(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in fields.items():
        if name not in known and not is_empty(value):
            raise _unseen(f"{where}.{name}", known, "a tool call")


def _text(content: object, where: str) -> str:
    """Return text, or the texts of parts joined by newlines."""
    if isinstance(content, str):
        return content
    parts = cast(list[object], content) if isinstance(content, list) else []
    if not parts:
        raise wrong(where, "text, or a list of text parts", cast(object, content))
    return "\n".join(_part(part, f"{where}[{number}]") for number, part in enumerate(parts))


def _part(part: object, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            for name, value in cast(dict[str, Any], part).items():
                if name not in _PART_FIELDS and not is_empty(value):
                    raise _unseen(f"{where}.{name}", _PART_FIELDS, "a text part")
            return text
        case {"type": str(kind)} if kind != "text":
            raise Refusal(
                f"{where} is of type {kind!r}, but the model in training reads text alone; "
                "send parts of type 'text'",
                param=where,
                code="unsupported_content",
            )
        case _:
            raise wrong(where, "a part such as {'type': 'text', 'text': '...'}", part)


def _recorded(plain: object, where: str) -> Message:
    fields, role = _fields_and_role(plain, where)
    thinking = fields.get("reasoning_content") or fields.get("reasoning")
    call_id = fields.get("tool_call_id")
    content, images = _recorded_content(fields.get("content"))
    return Message(
        role=role,
        content=content,
        reasoning=thinking if isinstance(thinking, str) else "",
        tool_calls=_recorded_calls(fields.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=call_id if isinstance(call_id, str) else None,
        refusal=_recorded_content(fields.get("refusal"))[0],
        images=images,
    )


def _recorded_content(content: object) -> tuple[str, tuple[Image, ...]]:
    """Return the text of `content`, with newlines between parts, and its images.

    A part of another kind becomes its name in brackets; that of a picture elsewhere also has its
    address, so that requests about different pictures are not taken for one conversation.
    """
    if isinstance(content, str):
        return content, ()
    text, images = "", list[Image]()
    for number, part in enumerate(cast(list[object], content) if isinstance(content, list) else ()):
        text += "\n" if number else ""
        if (image := image_in(part)) is not None:
            images.append(replace(image, at=len(text)))
        else:
            text += _recorded_part(part)
    return text, tuple(images)


def _recorded_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("http"):
            return f"[image_url {url}]"
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return "[part]"


def _recorded_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    found: list[ToolCall] = []
    listed = cast(list[object], calls) if isinstance(calls, list) else ()
    for number, call in enumerate(listed):
        match call:
            case {"function": {"name": str(name)}}:
                fields = cast(dict[str, Any], call)
                # Some programs send the object itself.
                given = fields["function"].get("arguments") or "{}"
                arguments = (
                    given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
                )
                found.append(ToolCall(id=str(fields.get("id", "")), name=name, arguments=arguments))
            case {"type": str(kind)} if kind != "function":
                raise unsupported(
                    f"{where}[{number}].type",
                    f"a call of type {kind!r:.80} cannot be recorded; send calls of functions",
                )
            case _:
                continue
    return tuple(found)
