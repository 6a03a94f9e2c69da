"""Tool calls between tags: as JSON (Qwen, Hermes) or as tags of their own (Qwen3-Coder, GLM)."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from telescope_train.chat.formats.reply import (
    Calls,
    CallText,
    ToolCallParser,
    ToolSchemas,
    broken_call,
    call_of,
    decode_json,
    joined,
)
from telescope_train.chat.formats.typed import typed_call, unwrapped

_OPEN, _CLOSE = _TAGS = ("<tool_call>", "</tool_call>")
_SEED_TAGS = ("<seed:tool_call>", "</seed:tool_call>")
_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>)?\s*", re.DOTALL
)
_FUNCTION_OF_JSON = re.compile(r"<function=(?P<name>[^>\n]+)>\s*")
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


def read_qwen3_coder(text: str, tools: ToolSchemas, *, tags: tuple[str, str] = _TAGS) -> Calls:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>` between the tags."""

    def read(block: str) -> CallText | None:
        match = _FUNCTION.fullmatch(block)
        if match is None or _PARAMETER.sub("", match["body"]).strip():
            return None
        pairs = [(key.strip(), unwrapped(value)) for key, value in _pairs(_PARAMETER, match)]
        return typed_call(match["name"].strip(), pairs, tools)

    return _around(text, _blocks(text, read, tags))


def read_glm45(text: str, tools: ToolSchemas) -> Calls:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` between the tags."""

    def read(block: str) -> CallText | None:
        match = _NAME_THEN_KEYS.fullmatch(block)
        if match is None or _KEY_AND_VALUE.sub("", match["body"]).strip():
            return None
        pairs = [(key.strip(), value) for key, value in _pairs(_KEY_AND_VALUE, match)]
        return typed_call(match["name"], pairs, tools)

    return _around(text, _blocks(text, read, _TAGS))


def read_functionary(text: str, tools: ToolSchemas) -> Calls:
    """Read `<function=NAME>{...}</function>`, any number of them."""
    return _around(text, _named_blocks(text))


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


def _blocks(
    text: str, read: Callable[[str], CallText | None], tags: tuple[str, str]
) -> Iterator[_Block]:
    opening, closing = tags
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start)
        position = end + len(closing) if end >= 0 else len(text)
        yield _Block(
            start, position, read(text[start + len(opening) : end if end >= 0 else len(text)])
        )


def _named_blocks(text: str) -> Iterator[_Block]:
    """Yield the blocks; arguments that are not JSON are kept as they were written."""
    position = 0
    while (match := _FUNCTION_OF_JSON.search(text, position)) is not None:
        try:
            _, stop = decode_json(text, match.end())
        except ValueError:
            stop = match.end()
        closing = text.find("</function>", stop)
        end = closing if closing >= 0 else len(text)
        position = min(len(text), end + len("</function>"))
        call = CallText(match["name"].strip(), text[match.end() : end].strip())
        yield _Block(match.start(), position, call)


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


HERMES = ToolCallParser(name="hermes", read=read_hermes, marks=(_OPEN, _CLOSE))
QWEN3_CODER = ToolCallParser(name="qwen3_coder", read=read_qwen3_coder, marks=(_OPEN, _CLOSE))
SEED_OSS = ToolCallParser(
    name="seed_oss", read=partial(read_qwen3_coder, tags=_SEED_TAGS), marks=_SEED_TAGS
)
FUNCTIONARY = ToolCallParser(name="functionary", read=read_functionary)
GLM45 = ToolCallParser(
    name="glm45",
    read=read_glm45,
    marks=(_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
