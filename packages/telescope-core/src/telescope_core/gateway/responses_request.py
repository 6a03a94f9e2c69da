"""Convert a request of OpenAI's Responses API into the equivalent chat request.

A program sends its whole history as `input`, or names the answer before with
`previous_response_id`. Fields without an equivalent in the chat API are refused by name.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from telescope_core.gateway.as_chat import (
    Placed,
    answer_for,
    chat_messages,
    in_words_of,
    without_use_of_no_tools,
)
from telescope_core.gateway.refusal import Refusal, is_empty, unknown, unsupported, wrong
from telescope_core.gateway.request import ChatRequest

MAX_KEPT = 16
"""Answers of a rollout that later requests may name; programs name the latest of each branch."""
THINKING_MARK = "telescope:"
"""Prefix of the `encrypted_content` of thinking; the text follows it in base64."""
_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "logprobs": "include",
    "tool_call_id": "call_id",
}
"""Name in the chat API -> name here."""
_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_logprobs"),
    *("user", "metadata", "safety_identifier", "service_tier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
_LABELS = ("include", "store", "reasoning", "stream_options", "client_metadata")
"""Parameters that are accepted without effect. The run's chat template decides whether the model
thinks."""
_LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probs."""
_REFUSED = {
    "conversation": "nothing is stored; send the whole history as input",
    "prompt": "nothing is stored; send the messages as input",
    "background": "an answer is waited for; leave it out",
    "max_tool_calls": "no tool is run here; let the program count",
}
_READ = (
    *(*_SAME, *_LABELS, "instructions", "input", "max_output_tokens", "tools", "tool_choice"),
    *("text", "truncation", "previous_response_id"),
)
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_MESSAGE_FIELDS = ("type", "role", "content", "id", "status", "phase")
_CALL_FIELDS = ("type", "call_id", "name", "arguments", "id", "status")
_RESULT_FIELDS = ("type", "call_id", "output", "id", "status")
_THINKING_FIELDS = ("type", "id", "summary", "content", "encrypted_content", "status")


def read_responses(
    body: object,
    read: Callable[[object], ChatRequest],
    *,
    kept: Mapping[str, Sequence[object]] = MappingProxyType({}),
) -> ChatRequest:
    """Return the result of `read` for the equivalent chat request; raises Refusal.

    `kept`: id of an answer, which `previous_response_id` may name -> the items up to it and its
    own.
    """
    if not isinstance(body, dict):
        raise wrong("the request", "a JSON object", body)
    given = {name: value for name, value in cast(dict[str, Any], body).items() if value is not None}
    for name, value in given.items():
        if name in _REFUSED and value is not False and not is_empty(value):
            raise unsupported(name, _REFUSED[name])
        if name not in (*_READ, *_REFUSED) and not is_empty(value):
            raise unknown("parameter", name, _READ)
    if given.get("truncation", "disabled") != "disabled":
        raise unsupported("truncation", "the program shortens its history itself; leave it out")
    items = _history(given, kept)
    placed = _messages(given.get("instructions"), items)
    renamed = {**dict.fromkeys(_SAME), "max_output_tokens": "max_tokens"}
    fields: dict[str, Any] = {
        chat or name: given[name] for name, chat in renamed.items() if name in given
    }
    fields["messages"] = chat_messages(placed)
    included: object = given.get("include")
    if given.get("top_logprobs") or (isinstance(included, list) and _LOGPROBS in included):
        fields["logprobs"] = True
    if tools := given.get("tools"):
        fields["tools"] = _tools(tools)
    if "tool_choice" in given:
        fields["tool_choice"] = _tool_choice(given["tool_choice"])
    try:
        asked = read(without_use_of_no_tools(fields) | _text_settings(given.get("text")))
    except Refusal as refusal:
        raise in_words_of(refusal, placed, _NAMES) from None
    return replace(asked, items=() if given.get("store") is False else tuple(items))


def _history(given: Mapping[str, Any], kept: Mapping[str, Sequence[object]]) -> list[object]:
    """Return the items of the input, behind those that are kept with the answer it goes on from."""
    plain = given.get("input")
    items: object = [{"role": "user", "content": plain}] if isinstance(plain, str) else plain
    if not isinstance(items, list) or not items:
        raise wrong("input", "text, or a list of at least one item", plain)
    new = cast(list[object], items)
    name = given.get("previous_response_id")
    if is_empty(name):
        return new
    if not isinstance(name, str) or name not in kept:
        raise Refusal(
            f"previous_response_id: there is no answer {name!r:.80} here; the last {MAX_KEPT} of a "
            "rollout that were not asked for with store = false are kept. Send the whole history "
            "as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    known = {_identity(one) for one in kept[name]} - {None}
    # Some programs repeat the calls of the answer before their results.
    return [*kept[name], *(one for one in new if _identity(one) not in known)]


def _identity(item: object) -> object:
    """Return what an item of an answer is known by; None for one of the program's own."""
    match item:
        case {"type": "function_call", "call_id": str(call_id)}:
            return "call", call_id
        case {"type": "message" | "reasoning", "id": str(name)}:
            return name
        case _:
            return None


def _text_settings(plain: object) -> dict[str, Any]:
    if plain is None:
        return {}
    if not isinstance(plain, dict):
        raise wrong("text", "an object", plain)
    settings = cast(dict[str, Any], plain)
    _require_fields(settings, ("format", "verbosity"), "text")
    fields: dict[str, Any] = {}
    if settings.get("verbosity") is not None:
        fields["verbosity"] = settings["verbosity"]
    match settings.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", **schema}:
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        case other:
            fields["response_format"] = other
    return fields


def _tools(plain: object) -> list[dict[str, Any]]:
    if not isinstance(plain, list):
        raise wrong("tools", "a list of tools", plain)
    found: list[dict[str, Any]] = []
    for number, one in enumerate(cast(list[object], plain)):
        where = f"tools[{number}]"
        match one:
            case {"type": "function", "name": str()}:
                tool = cast(dict[str, Any], one)
            case {"type": str(kind)} if kind != "function":
                raise unsupported(
                    f"{where}.type", f"{kind!r} is not run here; offer it as a function"
                )
            case _:
                raise wrong(where, "{'type': 'function', 'name': ...}", one)
        _require_fields(tool, _TOOL_FIELDS, where)
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(plain: object) -> object:
    match plain:
        case str():
            return plain
        case {"type": "allowed_tools", "mode": str(mode), "tools": list()}:
            tools = cast(list[object], cast(dict[str, Any], plain)["tools"])
            named = [_named(one, f"tool_choice.tools[{at}]") for at, one in enumerate(tools)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case {"type": "allowed_tools"}:
            raise wrong("tool_choice", "allowed_tools with a mode and a list of tools", plain)
        case _:
            return _named(plain, "tool_choice")


def _named(plain: object, where: str) -> dict[str, Any]:
    """Return in the form of the chat API what names a function."""
    match plain:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind != "function":
            raise unsupported(where, f"{kind!r:.80} is not run here; name a function")
        case _:
            raise wrong(where, "such as {'type': 'function', 'name': ...}", plain)


def _messages(instructions: object, items: Sequence[object]) -> list[Placed]:
    placed = list[Placed]()
    if instructions:
        if not isinstance(instructions, str):
            raise wrong("instructions", "text", instructions)
        text = [{"type": "text", "text": instructions}]
        placed.append(Placed({"role": "system", "content": text}, "instructions"))
    for number, one in enumerate(items):
        where = f"input[{number}]"
        if not isinstance(one, dict):
            raise wrong(where, "an item such as {'role': ..., 'content': ...}", one)
        _add_item(placed, cast(dict[str, Any], one), where)
    return placed


def _add_item(placed: list[Placed], item: dict[str, Any], where: str) -> None:
    """Add one input item to the messages; items of one answer become parts of one message."""
    match item.get("type", "message"):
        case "message":
            _add_message(placed, item, where)
        case "reasoning":
            _require_fields(item, _THINKING_FIELDS, where)
            thinking = _thinking(item, where)
            answer_for(placed, "thinking", where)["reasoning_content"] += thinking
        case "function_call":
            _require_fields(item, _CALL_FIELDS, where)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer_for(placed, "call", where)["tool_calls"].append(call)
        case "function_call_output":
            _require_fields(item, _RESULT_FIELDS, where)
            content = _parts(item.get("output"), f"{where}.output")
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            placed.append(Placed(result, where))
        case kind:
            raise Refusal(
                f"{where} is of type {kind!r:.80}, which the model could not be shown; "
                "expected message, reasoning, function_call or function_call_output",
                param=where,
                code="unsupported_content",
            )


def _add_message(placed: list[Placed], item: dict[str, Any], where: str) -> None:
    _require_fields(item, _MESSAGE_FIELDS, where)
    content = _parts(item.get("content"), f"{where}.content")
    role = item.get("role")
    if role == "assistant":
        answer_for(placed, "text", where)["content"] += content
    elif role in ("system", "developer") and placed and placed[-1].message["role"] == "system":
        # Programs say one half as instructions and the other as a first item.
        placed[-1].message["content"].extend(content)
    else:
        role = "system" if role == "developer" else role
        placed.append(Placed({"role": role, "content": content}, where))


def _parts(plain: object, where: str) -> list[dict[str, Any]]:
    if isinstance(plain, str):
        return [{"type": "text", "text": plain}]
    if not isinstance(plain, list):
        raise wrong(where, "text, or a list of parts", plain)
    found: list[dict[str, Any]] = []
    for number, one in enumerate(cast(list[object], plain)):
        match one:
            case {"type": "input_text" | "output_text" | "reasoning_text", "text": str(text)}:
                found.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                detail: object = cast(dict[str, Any], one).get("detail")
                picture = {"url": url} if detail is None else {"url": url, "detail": detail}
                found.append({"type": "image_url", "image_url": picture})
            case _:
                raise Refusal(
                    f"{where}[{number}] must be an input_text, an output_text or an input_image "
                    f"with an image_url, got {one!r:.80}",
                    param=f"{where}[{number}]",
                    code="unsupported_content",
                )
    return found


def _thinking(item: Mapping[str, Any], where: str) -> str:
    """Return the text of thinking: the visible one, or else the one in `encrypted_content`."""
    parts: object = item.get("content") or []
    if parts:
        shown = _parts(parts, f"{where}.content")
        return "\n".join(str(part.get("text")) for part in shown)
    packed: object = item.get("encrypted_content")
    if isinstance(packed, str) and packed.startswith(THINKING_MARK):
        try:
            return base64.b64decode(packed.removeprefix(THINKING_MARK), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            pass
    raise unsupported(
        where,
        "it has no thinking of this endpoint: send back its content or its encrypted_content as "
        "they came, or leave the item out",
    )


def _require_fields(fields: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not False and not is_empty(value):
            raise unknown("field", f"{where}.{name}", known)
