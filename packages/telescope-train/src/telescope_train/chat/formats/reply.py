"""What a parser of sampled text returns, and the JSON reading that all families share. Pure.

Nothing a model writes is lost: what cannot be read as a call stays in the text, and a call whose
name can be read but whose arguments cannot is a call with those arguments, for the tool to refuse.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from telescope_core.types import JsonValue

ToolSchemas = Sequence[Mapping[str, JsonValue]]
MAX_DEPTH = 64
"""Levels of nesting in a call's arguments; what is deeper is no call."""
_NAMED = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r"(?P<arguments>.*?)\}?\s*",
    re.DOTALL,
)


class CallText(NamedTuple):
    """A tool call as it was written."""

    name: str
    arguments: str
    """JSON text; where it is none, what was written instead."""


class Calls(NamedTuple):
    """The text of a reply, and the calls that stood in it."""

    content: str
    calls: tuple[CallText, ...] = ()


class Thought(NamedTuple):
    """A reply with its thinking taken out."""

    reasoning: str
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallParser:
    """How one family of models writes tool calls."""

    name: str
    read: Callable[[str, ToolSchemas], Calls]
    marks: tuple[str, ...] = ()
    """Special tokens that must not be dropped when ids become text."""
    is_envelope: bool = False
    """Whether the text is wrapped even where no tools are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """How one family of models marks its thinking."""

    name: str
    split: Callable[[str], Thought]
    marks: tuple[str, ...] = ()
    opening: str = ""
    """What a generation prompt ends with when the model is to begin by thinking."""
    closing: str = ""
    """What a generation prompt ends with when the model is not to think."""


def load_json(text: str) -> JsonValue:
    """Return the value of `text`; raises ValueError for all that is not strict JSON."""
    body = text.strip()
    value, stop = decode_json(body, 0)
    if stop != len(body):
        raise ValueError("something follows the JSON value")
    return value


def decode_json(text: str, start: int) -> tuple[JsonValue, int]:
    """Return the JSON value that begins at `start`, and where it ends; raises ValueError."""
    try:
        value, stop = json.JSONDecoder(parse_constant=_refuse).raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _require_shallow(value)
    return value, stop


def dump_json(value: JsonValue) -> str:
    """Return JSON text that can be encoded: half a surrogate pair is written as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def call_of(value: JsonValue) -> CallText | None:
    """Return the call in a JSON object that has a name and arguments; else None."""
    if not isinstance(value, Mapping):
        return None
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        return None
    for key in ("arguments", "parameters"):
        if key in value:
            arguments = value[key]
            break
    else:
        return None
    if arguments is None:
        arguments = {}
    # Some models write the arguments as JSON inside a string, as the chat API has them.
    text = arguments if isinstance(arguments, str) else dump_json(arguments)
    return CallText(name, text)


def calls_of_list(value: JsonValue) -> tuple[CallText, ...]:
    """Return the calls in a JSON list, all or none; an object stands for a list of one."""
    entries = value if isinstance(value, list) else [value]
    calls = [call_of(entry) for entry in entries]
    return tuple(call for call in calls if call is not None) if all(calls) else ()


def broken_call(text: str) -> CallText | None:
    """Return the call in text that is no JSON, where at least the name can be read."""
    match = _NAMED.fullmatch(text)
    return CallText(match["name"], match["arguments"].strip()) if match else None


def joined(pieces: Sequence[str]) -> str:
    """Return the text around calls, without the white space that set them apart."""
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


def _require_shallow(value: JsonValue) -> None:
    """A template writes nested values by recursion, and some of them in Python."""
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
