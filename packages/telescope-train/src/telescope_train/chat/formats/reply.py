"""The results of parsing sampled text, and the JSON functions that all families share. Pure.

Nothing that a model writes is lost. What cannot be read as a call stays in the text. If only the
name of a call can be read, it is a call with the arguments as written, which the tool refuses.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from telescope_core.types import JsonValue

ToolSchemas = Sequence[Mapping[str, JsonValue]]
MAX_DEPTH = 64
"""Most levels of nesting in a call's arguments; deeper JSON is not read as a call."""
_NAMED = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r"(?P<arguments>.*?)\}?\s*",
    re.DOTALL,
)


class CallText(NamedTuple):
    """A tool call as it was written."""

    name: str
    arguments: str
    """JSON text, or the text that was written in its place."""
    id: str = ""
    """The id that the model wrote for the call; empty if it wrote none that a template takes."""


class Calls(NamedTuple):
    """The text of a reply, and the calls that it contained."""

    content: str
    calls: tuple[CallText, ...] = ()


class Thought(NamedTuple):
    """A reply, separated into its thinking and the rest."""

    reasoning: str
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallParser:
    """How one family of models writes tool calls."""

    name: str
    read: Callable[[str, ToolSchemas], Calls]
    marks: tuple[str, ...] = ()
    """Special tokens that must not be dropped when ids are decoded."""
    is_envelope: bool = False
    """Whether the text is wrapped in marks even if no tools are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """How one family of models marks its thinking."""

    name: str
    split: Callable[[str], Thought]
    marks: tuple[str, ...] = ()
    opening: str = ""
    """The end of a generation prompt that lets the model begin by thinking."""
    closing: str = ""
    """The end of a generation prompt that keeps the model from thinking."""


def load_json(text: str) -> JsonValue:
    """Return the value of `text`; raises ValueError unless it is strict JSON."""
    body = text.strip()
    value, stop = decode_json(body, 0)
    if stop != len(body):
        raise ValueError("something follows the JSON value")
    return value


def decode_json(text: str, start: int) -> tuple[JsonValue, int]:
    """Return the JSON value that begins at index `start`, and its end; raises ValueError."""
    try:
        value, stop = json.JSONDecoder(parse_constant=_refuse).raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _require_shallow(value)
    return value, stop


def dump_json(value: JsonValue) -> str:
    """Return JSON text that can be encoded; half a surrogate pair is written as an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def call_of(value: JsonValue) -> CallText | None:
    """Return the call in a JSON object with a name and arguments; None for anything else."""
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
    # Some models write the arguments as JSON inside a string, as in the chat API.
    text = arguments if isinstance(arguments, str) else dump_json(arguments)
    return CallText(name, text)


def calls_of_list(value: JsonValue) -> tuple[CallText, ...]:
    """Return the calls in a JSON list, all or none; an object counts as a list of one."""
    entries = value if isinstance(value, list) else [value]
    calls = [call_of(entry) for entry in entries]
    return tuple(call for call in calls if call is not None) if all(calls) else ()


def broken_call(text: str) -> CallText | None:
    """Return the call in text that is not JSON, if at least the name can be read."""
    match = _NAMED.fullmatch(text)
    return CallText(match["name"], match["arguments"].strip()) if match else None


def joined(pieces: Sequence[str]) -> str:
    """Return the text around calls, without the white space that separated them."""
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


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
