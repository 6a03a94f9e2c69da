"""Tool calls as JSON after a mark: Llama, Mistral, Phi-4, Command, DeepSeek and others."""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import CallText, broken_call, calls_of_list, decode_json
from telescope_train.chat.formats.reply import (
    Block,
    Calls,
    ToolCallParser,
    ToolSchemas,
    cut_out,
    joined,
)

_PYTHON_TAG = "<|python_tag|>"
_OBJECTS = re.compile(r"[\s;,]*(?P<json>\{|\[\s*\{)")
"""Beginning of an object, or of a list of objects, with the separator before it."""
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(
    r"\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\](?P<id>[^\[]*))?(?:\[ARGS\])?\s*(?P<arguments>\{.*)",
    re.DOTALL,
)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""The only form of an id that the templates of Mistral accept."""
_PHI = re.compile(r"(?:<\|tool_call\|>|functools)(.*?)(?:<\|/tool_call\|>|\Z)", re.DOTALL)
_TOOL_CALLS = re.compile(r"<tool_calls>(.*?)(?:</tool_calls>|\Z)", re.DOTALL)
_TOOLCALL = re.compile(r"<TOOLCALL>(.*?)(?:</TOOLCALL>|\Z)", re.DOTALL)
_FUNCTION_CALL = re.compile(r"<function_call>(.*?)(?=<function_call>|\Z)", re.DOTALL)
_PLUGIN = re.compile(r"<\|action_start\|>\s*<\|plugin\|>(.*?)(?:<\|action_end\|>|\Z)", re.DOTALL)
_GIGACHAT = re.compile(r"<\|function_call\|>(.*?)(?=<\|function_call\|>|\Z)", re.DOTALL)
_ACTION = re.compile(r"<\|START_ACTION\|>(.*?)(?:<\|END_ACTION\|>|\Z)", re.DOTALL)
_BAR, _GAP = "\uff5c", "\u2581"
_DEEPSEEK_MARKS = tuple(
    f"<{_BAR}tool{_GAP}{part}{_BAR}>"
    for part in (
        f"calls{_GAP}begin",
        f"calls{_GAP}end",
        f"call{_GAP}begin",
        f"call{_GAP}end",
        "sep",
    )
)
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR = _DEEPSEEK_MARKS
_FENCED = re.compile(r"(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n?```\s*", re.DOTALL)


def read_llama3_json(text: str, tools: ToolSchemas) -> Calls:
    """Read calls as JSON, separated by `;`, with any text around them.

    All of it is text if one of the objects in it is no call.
    """
    body = text.replace(_PYTHON_TAG, "").strip()
    pieces: list[str] = []
    calls: list[CallText] = []
    position = 0
    while (found := _OBJECTS.search(body, position)) is not None:
        try:
            value, stop = decode_json(body, found.start("json"))
        except ValueError:
            broken = broken_call(body) if not calls else None
            return Calls("", (broken,)) if broken else Calls(text)
        some = calls_of_list(value)
        if not some:
            return Calls(text)
        calls += some
        pieces.append(body[position : found.start()])
        position = stop
    if not calls:
        return Calls(text)
    behind = body[position:].removeprefix(";")
    return Calls(joined([*pieces, behind]), tuple(calls))


def read_mistral(text: str, tools: ToolSchemas) -> Calls:
    """Read `[TOOL_CALLS]` followed by a JSON list, or by `NAME[ARGS]{...}` for each call."""
    content, *blocks = text.split(_MISTRAL)
    pieces, calls = [content], list[CallText]()
    for block in blocks:
        found, rest = _mistral_calls(block)
        calls += found
        pieces.append(rest if found else _MISTRAL + block)
    return Calls(joined(pieces), tuple(calls)) if calls else Calls(text)


def _mistral_calls(block: str) -> tuple[tuple[CallText, ...], str]:
    """Return the calls of one block and the text after them."""
    body = block.lstrip()
    if body.startswith(("[", "{")):
        try:
            value, stop = decode_json(body, 0)
        except ValueError:
            broken = broken_call(body.strip().removeprefix("[").removesuffix("]"))
            return ((broken,) if broken else (), "")
        return _with_ids(value), body[stop:]
    match = _MISTRAL_NAMED.fullmatch(body)
    if match is None:
        return (), ""
    call_id = _mistral_id(match["id"])
    try:
        _, stop = decode_json(match["arguments"], 0)
    except ValueError:
        return (CallText(match["name"], match["arguments"].strip(), call_id),), ""
    call = CallText(match["name"], match["arguments"][:stop], call_id)
    return (call,), match["arguments"][stop:]


def _with_ids(value: JsonValue) -> tuple[CallText, ...]:
    entries = value if isinstance(value, list) else [value]
    ids = [_mistral_id(one.get("id")) for one in entries if isinstance(one, Mapping)]
    calls = calls_of_list(value)
    return tuple(call._replace(id=own) for call, own in zip(calls, ids, strict=False))


def _mistral_id(value: JsonValue) -> str:
    text = value.strip() if isinstance(value, str) else ""
    return text if _MISTRAL_ID.fullmatch(text) else ""


def read_command_r(text: str, tools: ToolSchemas) -> Calls:
    """Read `<|START_ACTION|>[...]<|END_ACTION|>`, and unwrap the response."""
    bare = text.replace("<|START_RESPONSE|>", "").replace("<|END_RESPONSE|>", "")
    return read_lists(bare, tools, pattern=_ACTION) if tools else Calls(bare)


def read_lists(text: str, tools: ToolSchemas, *, pattern: re.Pattern[str]) -> Calls:
    """Read the JSON in each match of `pattern`: a list of calls, or consecutive calls."""
    matches = pattern.finditer(text)
    return cut_out(text, (Block(*one.span(), _listed_calls(one[1])) for one in matches))


def _listed_calls(text: str) -> Sequence[CallText]:
    try:
        return [call for value in _values(text) for call in calls_of_list(value)]
    except ValueError:
        broken = broken_call(text.strip().removeprefix("[").removesuffix("]"))
        return [broken] if broken else []


def _values(text: str) -> list[JsonValue]:
    """Return the JSON values that form `text`; raises ValueError for other text."""
    body, position = text.strip(), 0
    values: list[JsonValue] = []
    while position < len(body):
        value, position = decode_json(body, position)
        values.append(value)
        position += len(body[position:]) - len(body[position:].lstrip())
    return values


def read_deepseek(text: str, tools: ToolSchemas) -> Calls:
    """Read calls between DeepSeek's marks, with fenced arguments (V3, R1) or plain ones (V3.1)."""
    content, found, block = text.partition(_CALLS_BEGIN)
    if not found:
        return Calls(text)
    inside, _, after = block.partition(_CALLS_END)
    before, *parts = inside.split(_CALL_BEGIN)
    pieces, calls = [content, before], list[CallText]()
    for part in parts:
        written, _, rest = part.partition(_CALL_END)
        call = _deepseek_call(written)
        if call is None:
            pieces.append(_CALL_BEGIN + part)
        else:
            calls.append(call)
            pieces.append(rest)
    return Calls(joined([*pieces, after]), tuple(calls)) if calls else Calls(text)


def _deepseek_call(text: str) -> CallText | None:
    first, found, second = text.partition(_SEPARATOR)
    if not found:
        return None
    if first.strip() == "function":
        match = _FENCED.fullmatch(second)
        return CallText(match["name"].strip(), match["arguments"]) if match else None
    return CallText(first.strip(), second.strip()) if first.strip() else None


def _of_lists(name: str, pattern: re.Pattern[str], *marks: str) -> ToolCallParser:
    return ToolCallParser(name=name, read=partial(read_lists, pattern=pattern), marks=marks)


LLAMA3_JSON = ToolCallParser(name="llama3_json", read=read_llama3_json, marks=(_PYTHON_TAG,))
LLAMA4_JSON = ToolCallParser(name="llama4_json", read=read_llama3_json)
XLAM = ToolCallParser(name="xlam", read=read_llama3_json)
MISTRAL = ToolCallParser(name="mistral", read=read_mistral, marks=(_MISTRAL, "[ARGS]", "[CALL_ID]"))
PHI4 = _of_lists("phi4_mini_json", _PHI, "<|tool_call|>", "<|/tool_call|>")
"""`<|tool_call|>[...]<|/tool_call|>` or `functools[...]`; Granite 3 writes no closing mark."""
TOOL_CALLS = _of_lists("tool_calls", _TOOL_CALLS, "<tool_calls>", "</tool_calls>")
"""`<tool_calls>...</tool_calls>`: a list (Apriel), or one object in each line (MiniMax-M1)."""
GRANITE_FC = _of_lists("granite-20b-fc", _FUNCTION_CALL)
INTERNLM = _of_lists("internlm", _PLUGIN, "<|action_start|>", "<|plugin|>", "<|action_end|>")
GIGACHAT = _of_lists("gigachat3", _GIGACHAT, "<|function_call|>")
NEMOTRON = _of_lists("nemotron", _TOOLCALL, "<TOOLCALL>", "</TOOLCALL>")
COMMAND_R = ToolCallParser(
    name="command_r",
    read=read_command_r,
    marks=("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    is_envelope=True,
)
DEEPSEEK = ToolCallParser(name="deepseek", read=read_deepseek, marks=_DEEPSEEK_MARKS)
