"""Read tool calls that are written as JSON, alone or between `<tool_call>` tags.

Nothing that a model writes is lost. If only the name of a call can be read, it is a call with the
arguments as written, which the tool refuses. An object that does not say where its arguments are
is no call: it is never run with none.
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from telescope_core.base.types import JsonValue

MAX_DEPTH = 64
"""Most levels of nesting in a call's arguments; deeper JSON is not read as a call."""
OPENING, CLOSING = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters", "args")
"""The keys that models write for the arguments: as in the chat API, as Llama, and others."""
_NAMED = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters|args)"\s*:\s*'
    r"(?P<arguments>.*?)\}?\s*",
    re.DOTALL,
)
_BETWEEN = re.compile(r"(?:[\s,;]|```\w*)*")
"""White space, separators and code fences around the JSON values of a block."""
_ATTEMPT = re.compile(r"[\w<]")
"""Beginning of a block without JSON in which a call was meant: not a quote or a dot of prose."""


class CallText(NamedTuple):
    """A tool call as it was written."""

    name: str
    arguments: str
    """JSON text, or the text that was written in its place."""
    id: str = ""
    """The id that the model wrote for the call; empty if it wrote none that a template takes."""


class TaggedBlock(NamedTuple):
    """An opening tag with what belongs to it."""

    start: int
    end: int
    body: str
    """The text between the tags."""
    calls: tuple[CallText, ...]
    """Empty if the block is malformed."""


def tagged_blocks(text: str) -> Iterator[TaggedBlock]:
    """Yield the blocks `<tool_call>...</tool_call>` of `text`, malformed ones included.

    A block holds JSON objects of calls, or lists of them, maybe in a code fence. The JSON is read
    first, because a string in it may hold tags. The last block need not be closed. A tag that is
    only mentioned, with neither JSON nor a closed block of words behind it, is text.
    """
    position = 0
    while (start := text.find(OPENING, position)) >= 0:
        inside = start + len(OPENING)
        values, stop = _values(text, inside)
        following = text.find(OPENING, stop)
        limit = following if following >= 0 else len(text)
        closing = text.find(CLOSING, stop, limit)
        close = closing if closing >= 0 else limit
        body = text[inside:close]
        calls: tuple[CallText, ...] = ()
        if values and _BETWEEN.fullmatch(text, stop, close):
            found = [calls_of_list(value) for value in values]
            calls = tuple(call for some in found for call in some) if all(found) else ()
        elif not values or closing >= 0:
            broken = broken_call(body)
            calls = (broken,) if broken is not None else ()
        begin = _BETWEEN.match(body)
        first = body[begin.end() : begin.end() + 1] if begin else ""
        position = closing + len(CLOSING) if closing >= 0 else limit
        if calls or first in ("{", "[") or (closing >= 0 and _ATTEMPT.match(first)):
            yield TaggedBlock(start, position, body, calls)


def _values(text: str, position: int) -> tuple[list[JsonValue], int]:
    """Return the JSON objects and lists that stand at `position`, and the index behind them."""
    values: list[JsonValue] = []
    while begin := _BETWEEN.match(text, position):
        if not text.startswith(("{", "["), begin.end()):
            break
        try:
            value, position = decode_json(text, begin.end())
        except ValueError:
            break
        values.append(value)
    return values, position


def call_of(value: JsonValue) -> CallText | None:
    """Return the call in a JSON object with a name and arguments; None for anything else."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):  # the form of the chat API
        value = inner
    name = value.get("name", value.get("tool_name"))
    key = next((key for key in _ARGUMENTS if key in value), None)
    if not isinstance(name, str) or not name or key is None:
        return None
    given = value[key]
    if given is None:
        return CallText(name, "{}")
    # Some models write the arguments as JSON inside a string, as in the chat API.
    return CallText(name, given if isinstance(given, str) else dump_json(given))


def calls_of_list(value: JsonValue) -> tuple[CallText, ...]:
    """Return the calls in a JSON list, all or none; an object counts as a list of one."""
    entries = value if isinstance(value, list) else [value]
    calls = [call_of(entry) for entry in entries]
    return tuple(call for call in calls if call is not None) if all(calls) else ()


def broken_call(text: str) -> CallText | None:
    """Return the call in text that is not JSON, if at least the name can be read."""
    match = _NAMED.fullmatch(text)
    return CallText(match["name"], match["arguments"].strip()) if match else None


def load_json(text: str) -> JsonValue:
    """Return the value of `text`; raises ValueError unless it is one JSON value."""
    body = text.strip()
    value, stop = decode_json(body, 0)
    if stop != len(body):
        raise ValueError("something follows the JSON value")
    return value


def decode_json(text: str, start: int) -> tuple[JsonValue, int]:
    """Return the JSON value that begins at index `start`, and its end; raises ValueError.

    Line breaks inside strings are read, because models write them. NaN and Infinity are refused.
    """
    try:
        decoder = json.JSONDecoder(parse_constant=_refuse, strict=False)
        value, stop = decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _require_shallow(value)
    return value, stop


def canonical_arguments(text: str) -> str:
    """Return the arguments of a call in the one form in which equal JSON is equal text.

    Text that is no JSON stays as it is, without the white space around it.
    """
    try:
        value = load_json(text.strip() or "{}")
    except ValueError:
        return text.strip()
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def _with_whole_numbers(value: JsonValue) -> JsonValue:
    """Write 1.0 as 1, because some languages do so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    if isinstance(value, dict):
        return {key: _with_whole_numbers(one) for key, one in value.items()}
    return value


def dump_json(value: JsonValue) -> str:
    """Return JSON text that can be encoded; half a surrogate pair is written as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _require_shallow(value: JsonValue) -> None:
    """Raise ValueError if `value` is nested deeply; templates write nested values by recursion."""
    level: list[JsonValue] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
