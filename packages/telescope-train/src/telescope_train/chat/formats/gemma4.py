"""The tool calls of Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`.

Keys stand without quotes, and texts between `<|"|>` marks. Otherwise the values are JSON.
"""

import re
from contextlib import suppress

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import MAX_DEPTH, CallText, decode_json, dump_json
from telescope_train.chat.formats.reply import Block, Calls, ToolCallParser, ToolSchemas, cut_out

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_BLOCK = re.compile(
    rf"{re.escape(_OPEN)}call:(?P<name>[^\s{{<]+)(?P<body>\{{.*?)(?:{re.escape(_CLOSE)}|\Z)",
    re.DOTALL,
)
_KEY = re.compile(r"\s*([^\s:{}\[\],\"]+)\s*:")
_PLAIN = re.compile(r"[^,\]}]*")


def read_gemma4(text: str, tools: ToolSchemas) -> Calls:
    """Read the calls; unreadable arguments are kept as they were written."""
    return cut_out(text, map(_block, _BLOCK.finditer(text)))


def _block(match: re.Match[str]) -> Block:
    arguments = match["body"].strip()
    with suppress(ValueError):
        value, stop = _value(arguments, 0, 0)
        arguments = dump_json(value) if stop == len(arguments) else arguments
    return Block(*match.span(), [CallText(match["name"], arguments)])


def _value(text: str, start: int, depth: int) -> tuple[JsonValue, int]:
    """Return the value that begins at `start`, and its end; raises ValueError."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    while text.startswith(" ", start):
        start += 1
    if text.startswith(_QUOTE, start):
        inside = start + len(_QUOTE)
        end = text.index(_QUOTE, inside)
        return text[inside:end], end + len(_QUOTE)
    if text.startswith("{", start):
        return _object(text, start + 1, depth)
    if text.startswith("[", start):
        return _list(text, start + 1, depth)
    plain = _PLAIN.match(text, start)
    value, stop = decode_json(text[: plain.end() if plain else start], start)
    return value, stop


def _object(text: str, position: int, depth: int) -> tuple[JsonValue, int]:
    values: dict[str, JsonValue] = {}
    while not text.startswith("}", position):
        key = _KEY.match(text, position)
        if key is None:
            raise ValueError("a key was expected")
        values[key[1]], position = _value(text, key.end(), depth + 1)
        position = _behind(text, position, "}")
    return values, position + 1


def _list(text: str, position: int, depth: int) -> tuple[JsonValue, int]:
    values: list[JsonValue] = []
    while not text.startswith("]", position):
        value, position = _value(text, position, depth + 1)
        values.append(value)
        position = _behind(text, position, "]")
    return values, position + 1


def _behind(text: str, position: int, closing: str) -> int:
    """Return the index after a comma, or that of `closing`."""
    if text.startswith(",", position) and not text.startswith(closing, position + 1):
        return position + 1
    if not text.startswith(closing, position):
        raise ValueError(f"{closing!r} or a comma was expected")
    return position


GEMMA4 = ToolCallParser(name="gemma4", read=read_gemma4, marks=(_OPEN, _CLOSE, _QUOTE))
