"""Arguments that are written as keys and values: typed by the schema of the tool. Pure."""

from collections.abc import Mapping, Sequence

from telescope_core.types import JsonValue
from telescope_train.chat.formats.reply import CallText, ToolSchemas, dump_json, load_json


def typed_call(name: str, pairs: Sequence[tuple[str, str]], tools: ToolSchemas) -> CallText:
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


def unwrapped(value: str) -> str:
    """Drop the newline that a format puts on either side of a value."""
    return value.removeprefix("\n").removesuffix("\n")


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
