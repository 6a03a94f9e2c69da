"""Arguments written as keys and values, converted to the types in the tool's schema. Pure."""

import ast
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence

from telescope_core.base.types import JsonValue
from telescope_core.parsers.tool_calls import CallText, dump_json, load_json
from telescope_train.chat.formats.reply import ToolSchemas, functions_of

_TYPE_OF = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def typed_call(name: str, pairs: Sequence[tuple[str, str]], tools: ToolSchemas) -> CallText:
    """Return the call with values of the types that the tool's schema declares."""
    return CallText(name, dump_json(retyped(name, dict(pairs), tools)))


def retyped(name: str, values: Mapping[str, JsonValue], tools: ToolSchemas) -> dict[str, JsonValue]:
    """Return `values` with texts converted as the schema says: some templates quote everything."""
    declared = _properties(name, tools)
    return {
        key: _value(value, set(_types(declared.get(key)))) if isinstance(value, str) else value
        for key, value in values.items()
    }


def text_or_json(text: str, *, is_text: bool) -> JsonValue:
    """Return a value whose type stands beside it; JSON that cannot be read stays text."""
    if is_text:
        return text
    try:
        return load_json(text)
    except ValueError:
        return text


def unwrapped(value: str) -> str:
    """Remove the newlines that a format puts before and after a value."""
    return value.removeprefix("\n").removesuffix("\n")


def _value(text: str, types: set[str]) -> JsonValue:
    """Return `text` as the first of `types` that fits, in the order of vLLM.

    A parameter without a type is text. A value that fits no type is read as JSON, or else stays
    text, which the tool refuses.
    """
    bare = text.strip()
    if not types:
        return text
    if "null" in types and (bare.lower() == "null" or (bare == "None" and "string" not in types)):
        return None
    if types & {"integer", "number"}:
        for convert in (int, float) if "number" in types else (int,):
            try:
                number = convert(bare)
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    if "boolean" in types and bare.lower() in ("true", "1", "false", "0"):
        return bare.lower() in ("true", "1")
    if "string" in types and not types & {"object", "array"}:
        return text
    try:
        return load_json(text)
    except ValueError:
        return text if "string" in types else _literal(text)


def _literal(text: str) -> JsonValue:
    """Return the list or object that is written in Python syntax, or `text` itself."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return load_json(dump_json(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _properties(name: str, tools: ToolSchemas) -> Mapping[str, JsonValue]:
    parameters = functions_of(tools).get(name, {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _types(schema: JsonValue) -> Iterator[str]:
    """Yield the types that a schema allows; none if it names none."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    for one in declared if isinstance(declared, list) else [declared]:
        if isinstance(one, str):
            yield one
    allowed = schema.get("enum")
    for value in allowed if isinstance(allowed, list) else []:
        yield _TYPE_OF[type(value)]
    if "$ref" in schema:  # a recursive model, whose schema stands elsewhere
        yield "object"
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else []:
            yield from _types(choice)
