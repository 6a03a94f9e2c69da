"""Convert a request of Anthropic's Messages API into the equivalent chat request.

The rest is the same as in the chat API: which requests can be exact, and what is passed on in
evals. A block or parameter without an equivalent in the chat API is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from telescope_core.gateway.as_chat import (
    Placed,
    answer_for,
    chat_messages,
    in_words_of,
    without_use_of_no_tools,
)
from telescope_core.gateway.refusal import Refusal, is_empty, unknown, unsupported, wrong
from telescope_core.gateway.request import ChatRequest

INVALID_JSON = "INVALID_JSON"
"""The only key in the input of a call whose arguments are no JSON object; its value is their text.

Anthropic's guide to streamed tools has such calls sent back in this form.
"""
_NO_SYSTEM_BETWEEN = "mid_conversation_system_not_supported"
"""Error code for a system message between others; Claude Code then sends it as a user message."""
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_call_id": "tool_use_id",
}
"""Name in the chat API -> name here."""
_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_LABELS = ("metadata", "service_tier", "cache_control", "thinking")
"""Parameters that are accepted without effect. The run's chat template decides whether the model
thinks."""
_REFUSED = {
    "mcp_servers": "nothing is connected here; let the program connect, and offer tools",
    "container": "no code is run here; let the program run it, and offer a tool",
}
_READ = (
    *(*_SAME, *_LABELS, "messages", "system", "stop_sequences", "tools", "tool_choice"),
    *("output_config", "output_format", "context_management"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = (
    *("name", "description", "input_schema", "type", "cache_control", "strict"),
    "eager_input_streaming",
)
_BLOCK_FIELDS = {
    "text": ("type", "text", "cache_control", "citations"),
    "image": ("type", "source", "cache_control"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
    "thinking": ("type", "thinking", "signature", "cache_control"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
}
_PLACES = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("thinking", "text", "tool_use"),
    "result": ("text", "image"),
}
"""Types of blocks that are allowed in each place."""


def read_anthropic(body: object, read: Callable[[object], ChatRequest]) -> ChatRequest:
    """Return the result of `read` for the equivalent chat request; raises Refusal."""
    if not isinstance(body, dict):
        raise wrong("the request", "a JSON object", body)
    given = {name: value for name, value in cast(dict[str, Any], body).items() if value is not None}
    _require_known(given)
    placed = [*_system(given.get("system")), *_messages(given.get("messages"))]
    fields: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    fields["messages"] = chat_messages(placed)
    if given.get("stop_sequences"):
        fields["stop"] = given["stop_sequences"]
    if tools := given.get("tools"):
        fields["tools"] = _tools(tools)
    if "tool_choice" in given:
        fields |= _tool_choice(given["tool_choice"])
    if form := _output_format(given):
        schema = {"name": "output", "schema": form.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        return read(without_use_of_no_tools(fields))
    except Refusal as refusal:
        raise in_words_of(refusal, placed, _NAMES) from None


def _require_known(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _REFUSED and not is_empty(value):
            raise unsupported(name, _REFUSED[name])
        if name not in (*_READ, *_REFUSED) and not is_empty(value):
            raise unknown("parameter", name, _READ)
    managed: object = given.get("context_management") or {}
    if not isinstance(managed, dict):
        raise wrong("context_management", "an object", managed)
    edits: object = cast(dict[str, Any], managed).get("edits") or []
    if not isinstance(edits, list):
        raise wrong("context_management.edits", "a list", edits)
    for number, edit in enumerate(cast(list[object], edits)):
        match edit:
            case {"type": str(kind), "keep": "all"} if kind.startswith("clear_thinking"):
                pass
            case _:
                raise unsupported(
                    f"context_management.edits.{number}",
                    "the endpoint edits no history; send it as the model shall see it",
                )


def _output_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema for the answer; the parameter `effort` beside it is accepted."""
    config: object = given.get("output_config") or {}
    if not isinstance(config, dict):
        raise wrong("output_config", "an object", config)
    for name, value in cast(dict[str, Any], config).items():
        if name not in ("effort", "format") and not is_empty(value):
            raise unknown("parameter", f"output_config.{name}", ("effort", "format"))
    form: object = given.get("output_format") or cast(dict[str, Any], config).get("format") or {}
    if not isinstance(form, dict):
        raise wrong("output_config.format", "an object", form)
    kind = cast(dict[str, Any], form).get("type", "json_schema")
    if kind != "json_schema":
        raise unsupported("output_config.format", f"the type must be json_schema, got {kind!r:.80}")
    return cast(dict[str, Any], form)


def _tools(plain: object) -> list[dict[str, Any]]:
    if not isinstance(plain, list):
        raise wrong("tools", "a list of tools", plain)
    found: list[dict[str, Any]] = []
    for number, one in enumerate(cast(list[object], plain)):
        where = f"tools.{number}"
        match one:
            case {"type": str(kind)} if kind != "custom":
                raise unsupported(
                    f"{where}.type",
                    f"{kind!r} is not run here; let the program run it, and offer it with a name "
                    "and an input_schema",
                )
            case {"name": str(name), "input_schema": dict()}:
                tool = cast(dict[str, Any], one)
            case _:
                raise wrong(where, "a tool with name and input_schema", one)
        _require_fields(tool, _TOOL_FIELDS, where)
        function: dict[str, Any] = {"name": name, "parameters": tool["input_schema"]}
        for field in ("description", "strict"):
            if tool.get(field) is not None:
                function[field] = tool[field]
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(plain: object) -> dict[str, Any]:
    match plain:
        case {"type": "tool", "name": str(name)}:
            choice: object = {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in _CHOICES:
            choice = _CHOICES[kind]
        case _:
            raise wrong("tool_choice", "an object of type auto, any, tool or none", plain)
    disabled: object = cast(dict[str, Any], plain).get("disable_parallel_tool_use") or False
    if not isinstance(disabled, bool):
        raise wrong("tool_choice.disable_parallel_tool_use", "true or false", disabled)
    if disabled:
        return {"tool_choice": choice, "parallel_tool_calls": False}
    return {"tool_choice": choice}


def _system(plain: object) -> list[Placed]:
    if not plain:
        return []
    parts = [_part(block, where) for block, where in _blocks(plain, "system", "system")]
    return [Placed({"role": "system", "content": parts}, "system")]


def _messages(plain: object) -> list[Placed]:
    if not isinstance(plain, list) or not plain:
        raise wrong("messages", "a list of at least one message", cast(object, plain))
    placed = list[Placed]()
    for number, one in enumerate(cast(list[object], plain)):
        where = f"messages.{number}"
        match one:
            case {"role": "user" | "assistant"}:
                message = cast(dict[str, Any], one)
            case {"role": "system"}:
                raise Refusal(
                    f"{where}: many chat templates have no place for a system message between "
                    "others; say it in system, or in a message of the user",
                    param=where,
                    code=_NO_SYSTEM_BETWEEN,
                )
            case _:
                raise wrong(where, "a message of role user or assistant", one)
        _require_fields(message, ("role", "content"), where)
        add = _add_answer if message["role"] == "assistant" else _add_asked
        add(placed, message, where)
    return placed


def _add_asked(placed: list[Placed], asked: dict[str, Any], where: str) -> None:
    """Add the messages of a user: tool results, and then its texts as one message.

    Messages of the user in a row are one turn, as at Anthropic's endpoint.
    """
    for block, place in _blocks(asked.get("content"), "user", where):
        if block["type"] == "tool_result":
            inner: object = block.get("content") or ""
            parts = [_part(*one) for one in _blocks(inner, "result", place)]
            answered = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}
            placed.append(Placed(answered, place))
        elif placed and placed[-1].message["role"] == "user":
            placed[-1].message["content"].append(_part(block, place))
        else:
            placed.append(Placed({"role": "user", "content": [_part(block, place)]}, where))


def _add_answer(placed: list[Placed], answer: dict[str, Any], where: str) -> None:
    """Add the blocks of an assistant's answer, which may have none."""
    content: object = answer.get("content") or ""
    for block, place in _blocks(content, "assistant", where):
        kind = "call" if block["type"] == "tool_use" else str(block["type"])
        message = answer_for(placed, kind, where)
        if kind == "thinking":
            message["reasoning_content"] += _text_of(block, "thinking", place)
        elif kind == "text":
            message["content"].append(_part(block, place))
        else:
            message["tool_calls"].append(_call(block, place))


def _blocks(content: object, holder: str, where: str) -> list[tuple[dict[str, Any], str]]:
    """Return the blocks in field `where` of `holder`; plain text is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise wrong(f"{where}.content", "text or a list of blocks", content)
    inner = where if holder == "system" else f"{where}.content"
    found: list[tuple[dict[str, Any], str]] = []
    for number, one in enumerate(cast(list[object], content)):
        place = f"{inner}.{number}"
        match one:
            case {"type": str(kind)}:
                block = cast(dict[str, Any], one)
            case _:
                raise wrong(place, "a block with a type", one)
        if kind not in _PLACES[holder]:
            raise Refusal(
                f"{place} is of type {kind!r}, which the model could not be shown; expected "
                f"{', '.join(_PLACES[holder])}",
                param=place,
                code="unsupported_content",
            )
        _require_fields(block, _BLOCK_FIELDS[kind], place)
        found.append((block, place))
    return found


def _require_fields(fields: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not False and not is_empty(value):
            raise unknown("field", f"{where}.{name}", known)


def _text_of(block: Mapping[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise wrong(f"{where}.{name}", "text", text)
    return text


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": _text_of(block, "text", where)}
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            url = f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            pass
        case source:
            raise wrong(f"{where}.source", "a picture of type base64 or url", source)
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    match block:
        case {"id": str(call_id), "name": str(name), "input": dict()}:
            asked = cast(dict[str, Any], block["input"])
        case _:
            raise wrong(where, "a call with id, name and input", block)
    unread = asked.get(INVALID_JSON) if len(asked) == 1 else None
    arguments = unread if isinstance(unread, str) else msgspec.json.encode(asked).decode()
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
