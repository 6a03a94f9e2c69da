"""Tool calls between `<tool_call>` tags: as JSON (Qwen, Hermes) or as tags of their own."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from telescope_core.types import JsonValue
from telescope_train.chat.formats.reply import (
    Calls,
    CallText,
    ToolCallParser,
    ToolSchemas,
    broken_call,
    call_of,
    decode_json,
    dump_json,
    joined,
    load_json,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>)?\s*", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_NAME_THEN_KEYS = re.compile(r"\s*(?P<name>[^\s<]+)\s*(?P<body>(?:<arg_key>.*)?)", re.DOTALL)
_KEY_AND_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class _Block(NamedTuple):
    start: int
    end: int
    call: CallText | None


def read_hermes(text: str, tools: ToolSchemas) -> Calls:
    """Read `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number of them."""
    return _around(text, _json_blocks(text))


def read_qwen3_coder(text: str, tools: ToolSchemas) -> Calls:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>` between the tags."""

    def read(block: str) -> CallText | None:
        match = _FUNCTION.fullmatch(block)
        if match is None or _PARAMETER.sub("", match["body"]).strip():
            return None
        pairs = [(key.strip(), _unwrapped(value)) for key, value in _pairs(_PARAMETER, match)]
        return _typed(match["name"].strip(), pairs, tools)

    return _around(text, _blocks(text, read))


def read_glm45(text: str, tools: ToolSchemas) -> Calls:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` between the tags."""

    def read(block: str) -> CallText | None:
        match = _NAME_THEN_KEYS.fullmatch(block)
        if match is None or _KEY_AND_VALUE.sub("", match["body"]).strip():
            return None
        pairs = [(key.strip(), value) for key, value in _pairs(_KEY_AND_VALUE, match)]
        return _typed(match["name"], pairs, tools)

    return _around(text, _blocks(text, read))


def _pairs(pattern: re.Pattern[str], match: re.Match[str]) -> list[tuple[str, str]]:
    return pattern.findall(match["body"])


def _json_blocks(text: str) -> Iterator[_Block]:
    """Yield the blocks; the JSON is read first, because a string in it may hold the closing tag."""
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        inside = start + len(_OPEN)
        inside += len(text[inside:]) - len(text[inside:].lstrip())
        try:
            value, stop = decode_json(text, inside)
        except ValueError:
            value, stop = None, inside
        call = call_of(value)
        closing = text.find(_CLOSE, stop)
        if call is None or (closing >= 0 and text[stop:closing].strip()):
            call = broken_call(text[inside : closing if closing >= 0 else len(text)])
        elif closing < 0 and text[stop:].strip():
            call = None
        position = closing + len(_CLOSE) if closing >= 0 else len(text)
        yield _Block(start, position, call)


def _blocks(text: str, read: Callable[[str], CallText | None]) -> Iterator[_Block]:
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        closing = text.find(_CLOSE, start)
        position = closing + len(_CLOSE) if closing >= 0 else len(text)
        block = text[start + len(_OPEN) : closing if closing >= 0 else len(text)]
        yield _Block(start, position, read(block))


def _around(text: str, blocks: Iterator[_Block]) -> Calls:
    """Remove the readable blocks from `text`; unreadable ones stay in it."""
    pieces: list[str] = []
    calls: list[CallText] = []
    position = 0
    for block in blocks:
        if block.call is not None:
            pieces.append(text[position : block.start])
            calls.append(block.call)
            position = block.end
    if not calls:
        return Calls(text)
    return Calls(joined([*pieces, text[position:]]), tuple(calls))


def _typed(name: str, pairs: list[tuple[str, str]], tools: ToolSchemas) -> CallText:
    """Return the call; a value is read as JSON unless the tool's schema declares it a string."""
    types = _types(name, tools)
    values: dict[str, JsonValue] = {}
    for key, text in pairs:
        values[key] = text
        if types.get(key) != "string":
            try:
                values[key] = load_json(text)
            except ValueError:
                continue
    return CallText(name, dump_json(values))


def _types(name: str, tools: ToolSchemas) -> dict[str, JsonValue]:
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            return {
                key: schema.get("type")
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def _unwrapped(value: str) -> str:
    """Drop the newline that the format puts on either side of a value."""
    return value.removeprefix("\n").removesuffix("\n")


HERMES = ToolCallParser(name="hermes", read=read_hermes, marks=(_OPEN, _CLOSE))
QWEN3_CODER = ToolCallParser(name="qwen3_coder", read=read_qwen3_coder, marks=(_OPEN, _CLOSE))
GLM45 = ToolCallParser(
    name="glm45",
    read=read_glm45,
    marks=(_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
